"""Cumulative ops and the k largest, along dims that are cut."""

from __future__ import annotations

import math

import torch

from shardwise import Shard
from tests.ops.helpers import Case, check_case, communication, on, r, ranks, table
from tests.ops.test_reduce import special

I32, I64 = torch.int32, torch.int64
ties = r(5, 4, dtype=I64).clamp(-2, 2).float()


def with_nan() -> torch.Tensor:
    x = ties.clone()
    x[1, 2] = x[3, 2] = math.nan
    x[4] = math.inf
    return x


CASES: list[Case] = [
    ("cumsum", lambda x: x.cumsum(0), (r(5, 4),)),
    ("cumsum dtype", lambda x: x.cumsum(-2, dtype=torch.float64), (r(2, 5, 3),)),
    ("cumsum int", lambda x: x.cumsum(0), (r(5, 4, dtype=I32),)),
    ("cumsum bool", lambda x: x.cumsum(0), (r(5, 4, dtype=torch.bool),)),
    ("cumsum 0-dim", lambda x: x.cumsum(0), (r(),)),
    ("cumsum in place", lambda x: x.cumsum_(0), (r(5, 4),)),
    ("cumsum out", lambda x: torch.cumsum(x.detach(), 0, out=x.detach() * 0), (r(5, 4),)),
    ("cumprod", lambda x: x.cumprod(0), (r(5, 4),)),
    ("logcumsumexp", lambda x: x.logcumsumexp(0), (r(5, 4),)),
    ("logcumsumexp special", lambda x: x.logcumsumexp(1).detach(), (special(),)),
    ("cummax", lambda x: x.cummax(0), (r(5, 4),)),
    ("cummax ties", lambda x: x.cummax(0), (ties,)),
    ("cummax special", lambda x: [y.detach() for y in x.cummax(0)], (with_nan(),)),
    ("cummin special", lambda x: [y.detach() for y in x.cummin(0)], (with_nan(),)),
    ("cummin int", lambda x: x.cummin(1), (r(3, 5, dtype=I64),)),
    ("cummax bool", lambda x: x.cummax(0), (r(5, 4, dtype=torch.bool),)),
    ("topk", lambda x: x.topk(3, 0), (r(5, 4),)),
    ("topk smallest", lambda x: x.topk(2, 1, largest=False), (r(5, 4, 2),)),
    ("topk of all", lambda x: x.topk(5, 0), (torch.randperm(20).view(5, 4),)),
    ("topk of -inf", lambda x: x.topk(5, 0)[0], (torch.full((5, 4), -math.inf),)),
    ("topk 0-dim", lambda x: x.topk(1), (r(),)),
    ("topk none", lambda x: x.topk(0), (r(5),)),
]


@table(CASES)
def test_one_device_answer(fn, args) -> None:
    check_case(fn, args, limit=10)


def test_an_empty_piece_in_the_middle() -> None:
    """Nested cuts of 5 by 2 and 4 leave the fourth of eight pieces empty."""
    placements = [[[Shard(0), Shard(0)]]]
    for fn in (lambda x: x.cummax(0), lambda x: x.cumsum(0), lambda x: x.topk(3, 0), lambda x: x.max(0)):
        check_case(fn, (r(5, 3),), meshes=[(2, 4)], placements=placements)


def test_cut_dims_are_not_gathered() -> None:
    with ranks(4) as mesh:
        x = on(mesh, r(1 << 18), Shard(0))
        for fn in (lambda: x.cumsum(0), lambda: x.cummin(0), lambda: x.topk(3)):
            assert all("collective(s) inside" in text for text in communication(fn))


def test_complex_exponents() -> None:
    """Each sum has many logarithms; it is the one of one device, and large numbers do not overflow."""
    for value in (r(5, 3, dtype=torch.complex64) * 4, torch.full((5, 3), 1e4, dtype=torch.complex64)):
        check_case(lambda x: torch.logcumsumexp(x, 0), (value,), grad=False)
