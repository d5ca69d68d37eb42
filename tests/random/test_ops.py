"""Dropout, `out=`, Partial tensors, attention by kernels that draw, and drawing nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from shardwise import Partial, Replicate, Shard
from shardwise.random.bits import Key
from shardwise.random.box import Box
from shardwise.random.fill import fill
from shardwise.tensor.creation import randperm
from tests.ops.helpers import check_case, no_communication, on, r, ranks, table, whole

x = r(5, 6)


def test_dropout_is_the_same_with_and_without_gradients_and_needs_no_communication() -> None:
    with ranks(4) as mesh:
        given = on(mesh, x, Shard(0))
        found = []
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            torch.manual_seed(2)
            with mode(), no_communication():
                found.append(whole(F.dropout(given, 0.5)))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert set((found[0] / x).round(decimals=4).unique().tolist()) == {0.0, 2.0}


def test_dropout_has_gradients() -> None:
    with ranks(2) as mesh:
        given = on(mesh, x, Shard(1), grad=True)
        result = F.dropout(given, 0.5)
        result.backward(torch.ones_like(result))
        assert given.grad is not None
        torch.testing.assert_close(whole(given.grad) * x, whole(result))


def test_drawing_into_out() -> None:
    with ranks(2) as mesh:
        drawn = []
        for placement in (Replicate(), Shard(0), Partial()):
            target, chance = on(mesh, x, placement), on(mesh, x.sigmoid(), Shard(1))
            torch.manual_seed(0)
            torch.bernoulli(chance, out=target)
            drawn.append(whole(target))
        assert drawn[0].unique().tolist() == [0.0, 1.0]
        assert all(torch.equal(value, drawn[0]) for value in drawn[1:])


def test_partial_tensors_are_filled_as_global_tensors() -> None:
    with ranks(2) as mesh:
        drawn = []
        for placement in (Replicate(), Partial()):
            torch.manual_seed(0)
            drawn.append(whole(on(mesh, x, placement).uniform_()))
        torch.testing.assert_close(drawn[1], drawn[0])


OFF: list[Any] = [
    ("no dropout", lambda t: F.dropout(t, 0.5, False), (x,)),
    ("p = 0", lambda t: F.dropout(t, 0.0), (x,)),
]


@table(OFF)
def test_what_draws_nothing(fn: Any, args: Any) -> None:
    check_case(fn, args, limit=4, meshes=((2,),))


def _flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.3, True)[0]


def _efficient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.3, False)[0]


@pytest.mark.parametrize("kernel", [_flash, _efficient])
def test_attention_kernels_of_gpus(kernel: Any) -> None:
    """Kernels that draw a mask themselves are replaced by products and a mask by index, for any placements."""
    q, k, v = (r(2, 4, 6, 8, seed=seed) for seed in range(3))
    torch.manual_seed(3)
    mask = torch.empty(2, 4, 6, 6).bernoulli_(0.7)
    plain = [t.clone().requires_grad_() for t in (q, k, v)]
    scores = plain[0] @ plain[1].transpose(-2, -1) / 8**0.5
    if kernel is _flash:
        scores = scores.masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
    expected = (scores.softmax(-1) * mask / 0.7) @ plain[2]
    expected.square().sum().backward()
    for sizes, placements in (((1,), [Replicate()]), ((2, 2), [Shard(0), Shard(1)]), ((3,), [Shard(2)])):
        with ranks(*sizes) as mesh:
            inputs = [on(mesh, t, *placements, grad=True) for t in (q, k, v)]
            torch.manual_seed(3)
            result = kernel(*inputs)
            result.square().sum().backward()
            torch.testing.assert_close(whole(result), expected.detach(), rtol=1e-4, atol=1e-5)
            for shard, given in zip(inputs, plain, strict=True):
                assert shard.grad is not None
                torch.testing.assert_close(whole(shard.grad), given.grad, rtol=1e-4, atol=1e-5)


def test_a_scale_of_zero_is_not_the_default_scale() -> None:
    """All scores are the same, so that each query gets the mean of the values."""
    q, k, v = (r(2, 4, 6, 8, seed=seed) for seed in range(3))
    with ranks(2) as mesh:
        inputs = [on(mesh, t, Shard(1)) for t in (q, k, v)]
        result = torch.ops.aten._scaled_dot_product_flash_attention(*inputs, 1e-9, scale=0.0)[0]
        torch.testing.assert_close(whole(result), v.mean(2, keepdim=True).expand_as(v))


def test_permutations() -> None:
    torch.manual_seed(4)
    expected, state = torch.randperm(70_001), torch.get_rng_state()
    for sizes, placements in (((4,), [Shard(0)]), ((2, 2), [Replicate(), Shard(0)]), ((3,), [Partial("max")])):
        with ranks(*sizes) as mesh:
            torch.manual_seed(4)
            assert torch.equal(whole(randperm(70_001, device_mesh=mesh, placements=placements)), expected)
            assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", ["uniform_", "normal_", "exponential_"])
def test_fills_can_be_traced(name: str) -> None:
    """The key is an input of the traced program: the same key gives the same numbers, another key others."""
    arguments = (1.0,) if name == "exponential_" else (0.0, 1.0)

    def draw(first: Tensor, second: Tensor) -> Tensor:
        return fill(torch.empty(5, 6), Box(3, (5, 6), (9, 1)), Key(first, second), name, arguments)

    keys = torch.tensor(123), torch.tensor(-456)
    traced = make_fx(draw, tracing_mode="fake")(*keys)
    for first, second in (keys, (torch.tensor(7), torch.tensor(8))):
        expected = fill(torch.empty(5, 6), Box(3, (5, 6), (9, 1)), Key(first.item(), second.item()), name, arguments)
        assert torch.equal(traced(first, second), expected)
