"""F.linear stays one op and one node of autograd, and steps aside where others have their own idea of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shardwise import DTensor, Partial, Placement, Replicate, Shard
from shardwise.debug import CommDebugMode
from tests.ops.helpers import check_case, on, r, ranks, table, whole

CASES: list[Any] = [
    ("matrix", F.linear, (r(5, 4), r(3, 4), r(3))),
    ("four dims", F.linear, (r(2, 3, 2, 4), r(3, 4), r(3))),
    ("no rows", F.linear, (r(0, 4), r(3, 4), r(3))),
    ("no features", F.linear, (r(5, 0), r(3, 0), r(3))),
    ("uneven rows", F.linear, (r(3, 5, 4), r(3, 4), r(3))),
    ("uneven features", F.linear, (r(2, 3, 5), r(7, 5), r(7))),
    ("more ranks than rows", F.linear, (r(1, 2, 4), r(2, 4))),
    ("double precision", F.linear, (r(2, 5, 4, dtype=torch.float64), r(3, 4, dtype=torch.float64))),
    (
        "complex",
        F.linear,
        (r(5, 4, dtype=torch.complex64), r(3, 4, dtype=torch.complex64), r(3, dtype=torch.complex64)),
    ),
    ("weight of one row", F.linear, (r(2, 5, 4), r(4))),
]


@table(CASES)
def test_one_device_answer(fn: Any, args: Any) -> None:
    check_case(fn, args, limit=16)


@pytest.mark.parametrize(
    "placements",
    [
        ([Shard(0), Replicate()], [Replicate(), Shard(0)], [Replicate(), Shard(0)]),
        ([Shard(0), Shard(2)], [Replicate(), Shard(1)], [Replicate(), Replicate()]),
        ([Partial(), Shard(1)], [Replicate(), Replicate()], [Replicate(), Replicate()]),
    ],
)
def test_gradients_of_gradients(placements: tuple[list[Placement], ...]) -> None:
    data = r(4, 3, 6, dtype=torch.float64), r(5, 6, dtype=torch.float64), r(5, dtype=torch.float64)

    def twice(x: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
        (gradient,) = torch.autograd.grad(F.linear(x, w, b).pow(3).sum(), x, create_graph=True)
        return list(torch.autograd.grad(gradient.pow(2).sum(), (x, w, b)))

    expected = twice(*(tensor.clone().requires_grad_() for tensor in data))
    with ranks(2, 2) as mesh:
        found = twice(*(on(mesh, t, *p, grad=True) for t, p in zip(data, placements, strict=True)))
        for mine, plain in zip(found, expected, strict=True):
            torch.testing.assert_close(whole(mine), plain)


def test_it_is_one_node() -> None:
    with ranks(4) as mesh:
        made = F.linear(on(mesh, r(2, 8, 4), Shard(1), grad=True), on(mesh, r(3, 4)))
        assert isinstance(made.grad_fn.next_functions[0][0].variable, DTensor)  # type: ignore[union-attr]


def halves(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.linear(x, w)


def mapped(x: Tensor, w: Tensor) -> Tensor:
    return torch.func.vmap(F.linear, in_dims=(0, None))(x, w)


def recomputed(x: Tensor, w: Tensor) -> Tensor:
    result: Tensor = checkpoint(F.linear, x, w, use_reentrant=False)
    return result


def without_grad(x: Tensor, w: Tensor) -> Tensor:
    with torch.inference_mode():
        return F.linear(x, w)


@pytest.mark.parametrize("run", [halves, mapped, recomputed, without_grad])
def test_under_others(run: Callable[[Tensor, Tensor], Tensor]) -> None:
    x, w = r(4, 6, 5), r(3, 5)
    expected = run(x.clone().requires_grad_(), w.clone().requires_grad_())
    with ranks(4) as mesh:
        found = run(on(mesh, x, Shard(0), grad=True), on(mesh, w, grad=True))
        assert found.dtype == expected.dtype
        torch.testing.assert_close(whole(found.detach()), expected.detach(), rtol=2e-2, atol=2e-2)


def test_modes_see_what_happens_without_them() -> None:
    with ranks(4) as mesh:
        x, w = on(mesh, r(2, 8, 64), Shard(1), grad=True), on(mesh, r(256, 64), Shard(0), grad=True)
        alone = F.linear(x, w)
        with CommDebugMode() as seen:
            watched = F.linear(x, w)
        assert watched.spec is alone.spec
        assert seen.get_total_counts() == 1
        torch.testing.assert_close(whole(watched), whole(alone))
