"""Reductions: right on every placement, and over a cut dim without gathering it."""

from __future__ import annotations

import math

import pytest
import torch

from shardwise import Partial, Replicate, Shard
from shardwise.ops import extremes
from tests.ops.helpers import Case, check_case, communication, no_communication, on, r, ranks, table, whole

BF16, C64, F64 = torch.bfloat16, torch.complex64, torch.float64


AMINMAX_HAS_GRADIENTS = torch.torch_version.TorchVersion(torch.__version__) >= (2, 13)


def special(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """NaN, infinities and ties."""
    x = r(5, 4, 3, dtype=dtype)
    x[0, 0], x[1, 3], x[2], x[3] = math.nan, math.inf, -math.inf, (x[3] * 2).round()
    return x


def holes() -> torch.Tensor:
    return torch.where(torch.arange(4) > 2, math.nan, r(5, 4))


norm = torch.linalg.vector_norm

CASES: list[Case] = [
    ("sum", lambda x: x.sum(), (r(5, 4),)),
    ("sum dim", lambda x: x.sum(1), (r(5, 4),)),
    ("sum dims", lambda x: x.sum((0, 2), keepdim=True, dtype=F64), (r(5, 4, 2),)),
    ("sum int", lambda x: x.sum(0), (r(5, 4, dtype=torch.int32),)),
    ("sum bool", lambda x: x.sum(), (r(5, 4, dtype=torch.bool),)),
    ("sum of nothing", lambda x: x.sum(0), (r(0, 3),)),
    ("nansum", lambda x: x.nansum(0), (holes(),)),
    ("nanmean", lambda x: x.nanmean(0), (holes(),)),
    ("mean", lambda x: x.mean(), (r(5, 4),)),
    ("mean dim", lambda x: x.mean(0, keepdim=True), (r(5, 4, 2),)),
    ("mean bf16", lambda x: x.mean(0), (r(5, 4, dtype=BF16),)),
    ("mean complex", lambda x: x.mean(0), (r(5, 4, dtype=C64),)),
    ("mean 0-dim", lambda x: x.mean(), (r(),)),
    ("mean of nothing", lambda x: x.mean(0), (r(0, 3),)),
    ("mean out", lambda x: torch.mean(x.detach(), 0, out=x.detach()[0] * 0), (r(5, 4),)),
    ("prod", lambda x: x.prod(1), (r(5, 4),)),
    ("amax", lambda x: x.amax(0), (r(5, 4),)),
    ("amin", lambda x: x.amin((0, 1), True), (r(5, 4),)),
    ("amax special", lambda x: x.amax(1), (special(),)),
    ("max", lambda x: x.max(), (r(5, 4),)),
    ("max special", lambda x: x.max(), (special(),)),
    ("max other", lambda x, y: torch.max(x, y), (r(5, 4), r(4))),
    ("aminmax", lambda x: torch.aminmax(x if AMINMAX_HAS_GRADIENTS else x.detach(), dim=0, keepdim=True), (r(5, 4),)),
    ("max dim", lambda x: x.max(0), (r(5, 4),)),
    ("max dim special", lambda x: x.max(1), (special(),)),
    ("max dim f64", lambda x: x.max(1), (special(F64),)),
    ("max dim out", lambda x: torch.max(x.detach(), 0, out=(x.detach()[0] * 0, x.long()[0] * 0)), (r(5, 4),)),
    ("min dim", lambda x: x.min(0, True), (special(),)),
    ("min dim int64", lambda x: x.min(0), (r(5, 4, dtype=torch.int64),)),
    ("min dim int32", lambda x: x.min(0), (r(5, 4, dtype=torch.int32),)),
    ("max dim bool", lambda x: x.max(0), (r(5, 4, dtype=torch.bool),)),
    ("argmax", lambda x: x.argmax(1), (special(),)),
    ("argmin", lambda x: x.argmin(0, True), (special(),)),
    ("argmax all", lambda x: x.argmax(), (r(5, 4),)),
    ("argmin all", lambda x: x.argmin(None, True), (r(5, 4, 3),)),
    ("argmax all f64", lambda x: x.argmax(), (r(5, 4, dtype=F64).round(),)),
    ("argmax bf16", lambda x: x.argmax(0), (r(5, 4, dtype=BF16),)),
    ("any", lambda x: x.any(), (torch.tensor([0, 0, 0, 1, 0]).bool(),)),
    ("any dim", lambda x: x.any(0), (r(5, 4, dtype=torch.bool),)),
    ("any dims", lambda x: x.any(dim=(0, 1)), (r(5, 4),)),
    ("any of no dims", lambda x: x.any(dim=()), (r(5, 4).round(),)),
    ("all dim", lambda x: x.all(1, True), (r(5, 4, dtype=torch.bool),)),
    ("any uint8", lambda x: x.any(0), (r(5, 4, dtype=torch.uint8),)),
    ("count_nonzero", lambda x: x.count_nonzero(), (r(5, 4).round(),)),
    ("count_nonzero dim", lambda x: torch.count_nonzero(x, dim=(0,)), (r(5, 4).round(),)),
    ("var", lambda x: x.var(0, keepdim=True), (r(5, 4),)),
    ("var far from 0", lambda x: (x + 1000).var().detach(), (r(5, 4, dtype=F64),)),
    ("var correction", lambda x: x.var(0, correction=4), (r(5, 4),)),
    ("std", lambda x: x.std(1, correction=0), (r(5, 4),)),
    ("var_mean", lambda x: torch.var_mean(x, dim=(0, 1)), (r(5, 4, 3),)),
    ("var_mean complex", lambda x: torch.var_mean(x, dim=0), (r(5, 4, dtype=C64),)),
    ("std_mean bf16", lambda x: torch.std_mean(x.detach(), 0), (r(5, 4, dtype=BF16),)),
    ("norm", norm, (r(5, 4),)),
    ("norm 1", lambda x: norm(x, 1, dim=0), (r(5, 4),)),
    ("norm inf", lambda x: norm(x, math.inf, dim=1, keepdim=True), (r(5, 4),)),
    ("norm -inf", lambda x: norm(x, -math.inf), (r(5, 4),)),
    ("norm 0", lambda x: norm(x, 0), (r(5, 4),)),
    ("norm 3", lambda x: norm(x, 3, dim=(0, 1)), (r(5, 4),)),
    ("norm -2", lambda x: norm(x, -2.0, dim=0), (r(5, 4),)),
    ("norm complex", lambda x: norm(x, dim=0), (r(5, 4, dtype=C64),)),
    ("norm bf16", lambda x: norm(x.detach()), (r(5, 4, dtype=BF16),)),
    ("norm dtype", lambda x: norm(x, dtype=F64), (r(5, 4),)),
    ("torch.norm", lambda x: torch.norm(x), (r(5, 4),)),
    ("aten norm", lambda x: torch.ops.aten.norm.ScalarOpt_dim(x, 1, [0], True), (r(5, 4),)),
    ("norms of a list", lambda x, y: torch._foreach_norm([x.detach(), y.detach()], 1), (r(5, 4), r(3))),
    ("dist", lambda x, y: torch.dist(x, y, 3), (r(5, 4), r(4))),
    ("sort", lambda x: x.sort(0), (r(5, 4),)),
    ("sort stable", lambda x: x.sort(dim=1, stable=True, descending=True), (r(5, 4).round(),)),
    ("argsort", lambda x: x.argsort(0), (r(5, 4),)),
    ("kthvalue", lambda x: x.kthvalue(2, 0), (r(5, 4),)),
    ("median", lambda x: x.median(), (r(5, 4),)),
    ("median dim", lambda x: x.median(1, True), (r(5, 4),)),
    ("nanmedian", lambda x: x.nanmedian(0), (special(),)),
    ("mode", lambda x: x.mode(0), (r(5, 4, dtype=torch.int64),)),
    ("trace", lambda x: x.trace().detach(), (r(5, 4),)),
    ("histc", lambda x: x.histc(4), (r(5, 4),)),
    ("bincount", lambda x: x.abs().bincount(), (r(7, dtype=torch.int64),)),
    ("unique", lambda x: x.unique(), (r(7, dtype=torch.int64),)),
    ("equal", torch.equal, (r(5, 4, dtype=torch.int64), r(5, 4, dtype=torch.int64))),
    ("not equal", torch.equal, (r(5, 4), r(5, 4, seed=1))),
    ("allclose", torch.allclose, (r(5, 4), r(5, 4))),
    ("item", lambda x: x.sum().item(), (r(5, 4),)),
    ("tolist", lambda x: x.mean(0).detach().tolist(), (r(5, 4),)),
]


@table(CASES)
def test_one_device_answer(fn, args) -> None:
    check_case(fn, args, limit=6)


@table([case for case in CASES if case[0].startswith(("argm", "max dim", "min dim"))])
def test_an_extreme_among_more_elements_than_32_bits_count(fn, args, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extremes, "_MOST_PACKED", 0)
    check_case(fn, args, limit=6)


def test_values_are_packed_with_indices_of_32_bits_only() -> None:
    for index in (0, (1 << 32) - 1):
        packed = extremes.pack(torch.tensor([3.0]), torch.tensor([index]), True)
        assert extremes.unpack(packed, torch.float32, True) == (torch.tensor([3.0]), torch.tensor([index]))
    assert extremes._packs(torch.float32, 1 << 32)
    assert not extremes._packs(torch.float32, (1 << 32) + 1)


LOCAL = {
    "sum": lambda x: x.sum(0),
    "mean": lambda x: x.mean(),
    "amax": lambda x: x.amax((0, 1)),
    "any": lambda x: (x > 2).any(),
    "prod": lambda x: x.prod(0),
    "argmax of the other dim": lambda x: x.argmax(1),
    "var of the other dim": lambda x: x.var(1),
    "sort of the other dim": lambda x: x.sort(1)[0],
}


@pytest.mark.parametrize("name", LOCAL)
def test_needs_no_communication(name: str) -> None:
    x = r(5, 4)
    with ranks(4) as mesh:
        with no_communication():
            result = LOCAL[name](on(mesh, x, Shard(0)))
        torch.testing.assert_close(whole(result), LOCAL[name](x))


MERGED = {
    "argmax": lambda x: x.argmax(),
    "max": lambda x: x.max(0),
    "var": lambda x: x.var((0, 1)),
    "norm": lambda x: norm(x),
    "logsumexp": lambda x: x.logsumexp((0, 1)),
}


@pytest.mark.parametrize("name", MERGED)
def test_two_cut_dims_are_merged_at_once(name: str) -> None:
    with ranks(2, 3) as mesh:
        x = on(mesh, r(512, 256), Shard(0), Shard(1))
        for text in communication(lambda: MERGED[name](x)):
            assert "collective(s) inside" in text


def test_partial_results() -> None:
    with ranks(4) as mesh:
        x = on(mesh, r(5, 4), Shard(0))
        assert x.sum(0).placements == (Partial("sum"),)
        assert x.mean(0).placements == (Partial("sum"),)
        assert x.amin(0).placements == (Partial("min"),)
        assert x.argmax(0).placements == (Replicate(),)


def test_item_of_a_partial() -> None:
    x = r(5, 4)
    with ranks(4) as mesh:
        total = on(mesh, x, Shard(0)).sum()
        assert total.placements == (Partial("sum"),)
        assert total.item() == pytest.approx(x.sum().item())
        assert bool(total > 0) == bool(x.sum() > 0)
        assert on(mesh, x, Partial("sum")).amax(0).tolist() == pytest.approx(x.amax(0).tolist())
