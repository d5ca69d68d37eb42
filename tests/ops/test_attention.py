"""Attention as the CPU runs it: batch, heads and queries cut, masks, grouped heads, gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise import Replicate, Shard
from tests.ops.helpers import check_case, no_communication, on, r, ranks, table, whole

attend = F.scaled_dot_product_attention
q, k, v = r(2, 4, 5, 8), r(2, 4, 3, 8, seed=1), r(2, 4, 3, 8, seed=2)
same = r(2, 3, 5, 8), r(2, 3, 5, 8, seed=1), r(2, 3, 5, 8, seed=2)

CASES: list[Any] = [
    ("plain", attend, (q, k, v)),
    ("causal", lambda q, k, v: attend(q, k, v, is_causal=True), same),
    ("scale", lambda q, k, v: attend(q, k, v, scale=0.3), (q, k, v)),
    ("mask", lambda *t: attend(*t[:3], attn_mask=t[3].detach()), (*same, r(5, 5))),
    ("mask of a batch", lambda *t: attend(*t[:3], attn_mask=t[3].detach()), (*same, r(2, 1, 5, 5))),
    ("mask that is learned", lambda *t: attend(*t[:3], attn_mask=t[3]), (*same, r(5, 5))),
    ("bools", lambda *t: attend(*t[:3], attn_mask=t[3]), (*same, r(5, 5) > -1)),
    ("grouped heads", lambda q, k, v: attend(q, k, v, enable_gqa=True), (q, r(2, 2, 3, 8), r(2, 2, 3, 8, seed=2))),
    ("without heads", attend, (r(4, 5, 8), r(4, 3, 8), r(4, 3, 8))),
]


@table(CASES)
def test_attention(fn: Any, args: Any) -> None:
    check_case(fn, args, limit=4)


@table([case for case in CASES if case[0] != "mask that is learned"])
def test_attention_of_replicated_operands(fn: Any, args: Any) -> None:
    def inferred(*tensors: Tensor) -> Any:
        with torch.inference_mode():
            return fn(*tensors)

    check_case(inferred, args, limit=3, grad=False, meshes=((4,), (2, 2)))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dim", "size"), [(0, 2), (1, 2), (1, 4), (0, 4)])
def test_cut_batches_and_heads_need_no_communication(causal: bool, dim: int, size: int) -> None:
    inputs = (q, q + 1, q - 1)
    with ranks(size) as mesh:
        tensors = [on(mesh, t, Shard(dim), grad=True) for t in inputs]
        with no_communication():
            result = attend(*tensors, is_causal=causal)
            result.backward(torch.ones_like(result))
        assert result.placements == (Shard(dim),)
        plain = [t.clone().requires_grad_() for t in inputs]
        wanted = attend(*plain, is_causal=causal)
        wanted.sum().backward()
        torch.testing.assert_close(whole(result), wanted.detach())
        for tensor, one in zip(tensors, plain, strict=True):
            assert tensor.grad.placements == (Shard(dim),)  # type: ignore[union-attr]
            torch.testing.assert_close(whole(tensor.grad), one.grad)  # type: ignore[arg-type]


def test_cut_queries_are_local_unless_a_mask_counts_them() -> None:
    with ranks(4) as mesh:
        query = on(mesh, q, Shard(2))
        key, value = on(mesh, k, Replicate()), on(mesh, v, Replicate())
        with no_communication():
            assert attend(query, key, value).placements == (Shard(2),)
            mask = on(mesh, r(5, 3), Shard(0))
            assert attend(query, key, value, attn_mask=mask).placements == (Shard(2),)


def test_grouped_heads_are_cut_together() -> None:
    with ranks(2) as mesh:
        query, key = on(mesh, q, Shard(1)), on(mesh, r(2, 2, 3, 8), Shard(1))
        with no_communication():
            assert attend(query, key, key, enable_gqa=True).placements == (Shard(1),)


def test_dropout_is_the_same_whatever_is_cut() -> None:
    found = []
    for placement in (Replicate(), Shard(0), Shard(1)):
        with ranks(2) as mesh:
            torch.manual_seed(1)
            found.append(whole(attend(*(on(mesh, t, placement) for t in (q, k, v)), dropout_p=0.5)))
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])
