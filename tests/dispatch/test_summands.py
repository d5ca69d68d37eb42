"""Operands that are added to a sum over a sharded factor are Partial there; all others are replicated."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import shardwise
from shardwise import Partial, Placement, Replicate, Shard
from shardwise.notation import bind, parse, summands
from shardwise.ops.registry import rule_for
from shardwise.testing import check, make_dtensor
from shardwise.testing.calls import try_call
from shardwise.testing.recording import Recorded

OPS: dict[str, tuple[str, Callable[..., Tensor], int, set[int]]] = {
    # name: rule, what it computes, how many of its operands lack k, and which of these are summands of k
    "bias": ("m?, m k, m k -> m ; linear 0+1 | 0+2", lambda a, x, y: a + (x * y).sum(1), 1, {0}),
    # x is linear alone, so a may be replicated, and must be: Partial it would meet only a part of x.
    "weighted": ("m?, m k, m k -> m ; linear 1 | 0+2", lambda a, x, y: (x * (a[:, None] + y)).sum(1), 1, set()),
    # Either a or b may be Partial, not both.
    "product": ("m?, m?, m k -> m ; linear 0+2 | 1+2", lambda a, b, x: a * b + x.sum(1), 2, {0}),
    # a is not read at all.
    "unused": ("m?, m k -> m ; linear 1 | 0+1", lambda a, x: x.sum(1), 1, set()),
    # The average of replicated operands is that operand.
    "average": ("m?, m k -> m ; linear 0+1 ; reduce avg", lambda a, x: a + x.mean(1), 1, set()),
}


def arguments(lacking: int, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn((4,) if i < lacking else (4, 6), generator=generator) for i in range(count)]


@pytest.fixture(scope="module")
def library() -> torch.library.Library:
    library = torch.library.Library("summands", "FRAGMENT")
    for name, (rule, function, _, _) in OPS.items():
        operands = ", ".join(f"Tensor t{i}" for i in range(len(parse(rule).inputs)))
        library.define(f"{name}({operands}) -> Tensor")
        library.impl(name, function, "CompositeExplicitAutograd")
        shardwise.register_sharding(getattr(torch.ops.summands, name).default, rule)
    return library  # the ops exist as long as it does


@pytest.mark.parametrize("name", OPS)
def test_which_operands_are_summands(name: str) -> None:
    text, _, lacking, wanted = OPS[name]
    tensors = arguments(lacking, len(parse(text).inputs))
    bound = bind(parse(text), [tuple(tensor.shape) for tensor in tensors])
    assert summands(bound, bound.factor("k")) == wanted


@pytest.mark.parametrize("name", OPS)
def test_a_sharded_sum_is_the_one_device_sum(name: str, library: torch.library.Library) -> None:
    text, _, lacking, _ = OPS[name]
    op = getattr(torch.ops.summands, name).default
    tensors = arguments(lacking, len(parse(text).inputs))
    assert check(op, *tensors, meshes=((2,), (2, 2)), limit=200, grad=False).cases > 20
    with shardwise.simulate(2):
        mesh = init_device_mesh("cpu", (2,))
        placements: list[Placement] = [Replicate()] * lacking + [Shard(1)] * (len(tensors) - lacking)
        given = [make_dtensor(t, mesh, [p], seed=i) for i, (t, p) in enumerate(zip(tensors, placements, strict=True))]
        assert op(*given).placements == (Partial("avg" if "avg" in text else "sum"),)


@pytest.mark.parametrize("name", OPS)
def test_the_verifier_tries_the_same_summands(name: str, library: torch.library.Library) -> None:
    text, _, lacking, _ = OPS[name]
    op: Any = getattr(torch.ops.summands, name).default
    assert rule_for(op) is not None
    tried = try_call(Recorded(op, tuple(arguments(lacking, len(parse(text).inputs))), {}), (2,))
    assert tried.cases
    assert not tried.failures
