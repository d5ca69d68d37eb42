"""Splits, slices and joins of interleaved dims: at the edges of blocks they cost nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise import InterleavedShard, Placement, Replicate, Shard
from shardwise.debug import CommDebugMode
from tests.ops.helpers import on, r, ranks, whole

Parts = list[Tensor]


def parts_of(result: Any) -> Parts:
    return list(result) if isinstance(result, (tuple, list)) else [result]


CASES: list[tuple[str, int, Callable[[Tensor], Any]]] = [
    ("chunk", 2, lambda x: x.chunk(2, -1)),
    ("split", 3, lambda x: x.split(8, -1)),
    ("split in two sizes", 3, lambda x: x.split([16, 8], -1)),
    ("split into blocks of two", 6, lambda x: x.split([8, 12, 4], -1)),
    ("unsafe", 3, lambda x: torch.unsafe_split(x, 8, -1)),
    ("first block", 3, lambda x: x[..., :8]),
    ("last blocks", 3, lambda x: x[..., -16:]),
    ("inner block", 3, lambda x: x.narrow(-1, 8, 8)),
    ("copied", 3, lambda x: torch.slice_copy(x, 1, 8, 16)),
]


@pytest.mark.parametrize(("blocks", "fn"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_nothing_moves_at_the_edges_of_blocks(blocks: int, fn: Callable[[Tensor], Any]) -> None:
    data = r(4, 24)
    plain = data.clone().requires_grad_()
    expected = parts_of(fn(plain))
    sum(part.pow(2 + i).sum() for i, part in enumerate(expected)).backward()
    with ranks(2, 2) as mesh:
        x = on(mesh, data, Shard(0), InterleavedShard(1, blocks), grad=True)
        with CommDebugMode() as comm:
            found = parts_of(fn(x))
            torch.autograd.backward(
                [part.pow(2 + i) for i, part in enumerate(found)], [torch.ones_like(p) for p in found]
            )
        assert comm.get_total_counts() == 0
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(whole(mine), theirs.detach())
        assert x.grad.placements == x.placements
        torch.testing.assert_close(whole(x.grad), plain.grad)


OTHERS: dict[str, Callable[[Tensor], Any]] = {
    "unbind": lambda x: x.unbind(-1),
    "split": lambda x: x.split([7, 17], -1),
    "slice": lambda x: x[..., 1:9],
    "step": lambda x: x[..., ::2],
}


@pytest.mark.parametrize("fn", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("placement", [InterleavedShard(1, 3), InterleavedShard(1, 2), Shard(1)])
def test_other_edges_are_right_too(fn: Callable[[Tensor], Any], placement: Placement) -> None:
    data = r(4, 24)
    plain = data.clone().requires_grad_()
    expected = parts_of(fn(plain))
    expected[0].pow(2).sum().backward()
    with ranks(2) as mesh:
        x = on(mesh, data, placement, grad=True)
        found = parts_of(fn(x))
        found[0].pow(2).sum().backward()
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(whole(mine), theirs.detach())
        torch.testing.assert_close(whole(x.grad), plain.grad)


def test_a_fused_projection_of_queries_keys_and_values() -> None:
    """Two heads of queries for each of keys and values, sharded by heads, forward and backward."""
    x, weight = r(2, 3, 16), r(32, 16, seed=1)

    def attend(x: Tensor, weight: Tensor) -> Tensor:
        q, k, v = F.linear(x, weight).split([16, 8, 8], -1)
        q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))
        return mixed.transpose(1, 2).flatten(2)

    with ranks(2) as mesh:
        # blocks: two of queries, one of keys, one of values
        w = on(mesh, weight, InterleavedShard(0, 4), grad=True)
        tokens = on(mesh, x)
        with CommDebugMode() as comm:
            F.linear(tokens, w).split([16, 8, 8], -1)
        assert comm.get_total_counts() == 0
        plain = weight.clone().requires_grad_()
        expected = attend(x, plain)
        expected.square().sum().backward()
        found = attend(tokens, w)
        found.square().sum().backward()
        torch.testing.assert_close(whole(found), expected.detach())
        torch.testing.assert_close(whole(w.grad), plain.grad)


def test_writes_reach_the_tensor() -> None:
    data = r(4, 24)
    expected = data.clone()
    expected.chunk(2, -1)[1].zero_()
    expected[:, :12].add_(1)
    with ranks(2) as mesh:
        x = on(mesh, data, InterleavedShard(1, 2))
        x.chunk(2, -1)[1].zero_()
        x[:, :12].add_(1)
        torch.testing.assert_close(whole(x), expected)


def test_writes_at_other_edges_are_seen_by_the_next_view() -> None:
    data = r(4, 24)
    expected = data.clone()
    expected[:, 3:7] = 2.0
    expected[:, :12].mul_(3)
    with ranks(2) as mesh:
        x = on(mesh, data, InterleavedShard(1, 3))
        x[:, 3:7] = 2.0
        x[:, :12].mul_(3)
        torch.testing.assert_close(whole(x), expected)


@pytest.mark.parametrize("sizes", [(8, 8), (8, 16, 8)])
def test_joins_of_blocks(sizes: tuple[int, ...]) -> None:
    data = [r(3, size, seed=i) for i, size in enumerate(sizes)]
    with ranks(2) as mesh:
        tensors = [on(mesh, t, Shard(1) if t.shape[1] == 8 else InterleavedShard(1, 2), grad=True) for t in data]
        with CommDebugMode() as comm:
            joined = torch.cat(tensors, 1)
            joined.sum().backward()
        assert comm.get_total_counts() == 0
        assert joined.placements == (InterleavedShard(1, sum(sizes) // 8),)
        torch.testing.assert_close(whole(joined), torch.cat(data, 1))
        for tensor in tensors:
            torch.testing.assert_close(whole(tensor.grad), torch.ones(tensor.shape))
        uneven = [on(mesh, r(3, 5), Shard(1)), on(mesh, r(3, 5), Shard(1)), on(mesh, r(3, 2), Replicate())]
        torch.testing.assert_close(whole(torch.cat(uneven, 1)), torch.cat([r(3, 5), r(3, 5), r(3, 2)], 1))
