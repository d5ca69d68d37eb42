"""Operands stay Partial only where the result is that of one device, also for NaN, infinities and wrap-around."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise
from shardwise import DTensor, Partial, Shard, explicit
from shardwise.notation import bind, parse, passes
from shardwise.sharding.dtypes import sums_alike
from shardwise.testing import assemble
from shardwise.testing.partial_operands import operands
from tests.ops.helpers import communication, on, ranks, whole
from tests.worlds import mesh_of

nan, inf = math.nan, math.inf

FLOATS = torch.tensor(
    [
        [nan, 1.0, -inf, inf, -0.0, 3.0, -2.0, 0.0],
        [5.0, nan, 7.0, -inf, -1.0, 1e38, -0.0, -inf],
        [-3.0, 2.0, inf, 0.5, -0.0, -3e38, -inf, nan],
        [1.0, -4.0, 2.0, 3.0, -0.5, 2e38, 4.0, 1.0],
    ]
)
LEAST, GREATEST = -(2**31), 2**31 - 1
INTEGERS = torch.tensor(
    [[GREATEST, LEAST, 5, 2**30], [1, -1, LEAST, 2**30], [7, 3, 2, 2**30], [0, -9, 4, 2**30]], dtype=torch.int32
)

EXTREMES: dict[str, Callable[[Tensor], Tensor]] = {
    "sign": lambda x: x.amax(0).sign(),
    "fmax": lambda x: torch.fmax(x.amax(0), torch.ones(())),
    "fmin": lambda x: torch.fmin(x.amin(0), torch.ones(())),
    "add infinity": lambda x: x.amax(0) + inf,
    "subtract infinity": lambda x: x.amin(0) - inf,
    "neg": lambda x: -x.amax(0),
    "relu": lambda x: x.amax(0).relu(),
    "clamp": lambda x: x.amin(0).clamp(-1, 1),
    "maximum": lambda x: torch.maximum(x.amax(0), (2 * x).amax(0)),
    "minimum of a maximum": lambda x: torch.minimum(x.amax(0), (2 * x).amax(0)),
    "hardsigmoid": lambda x: torch.nn.functional.hardsigmoid(x.amax(0)),
    "exp": lambda x: x.amax(0).exp(),
    "trunc": lambda x: x.amin(0).trunc(),
    "where": lambda x: torch.where(x.amax(0) > 1, x.amax(0), x.amin(0)),
    "view": lambda x: x.amax(0).view(2, 4),
}
WRAPPING: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(0, dtype=torch.int32).sum(),
    "cumsum": lambda x: x.sum(0, dtype=torch.int32).cumsum(0),
    "times a float": lambda x: x.sum(0, dtype=torch.int32) * 2.5,
    "divided": lambda x: x.sum(0, dtype=torch.int32) / 3,
    "cast": lambda x: x.sum(0, dtype=torch.int32).long(),
    "plus a wider sum": lambda x: x.sum(0, dtype=torch.int32) + x.sum(0),
    "neg": lambda x: -x.sum(0, dtype=torch.int32),
    "times an integer": lambda x: x.sum(0, dtype=torch.int32) * 3,
    "neg of a maximum": lambda x: -x.amax(0),
    "neg of a minimum": lambda x: -x.amin(0),
    "maximum plus": lambda x: x.amax(0) + 9,
    "product": lambda x: x.prod(0, dtype=torch.int32).prod(),
}
SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "divided by zeros": lambda x: x.sum(0) / torch.zeros(4),
    "divided by some zeros": lambda x: x.sum(0) / x.sum(0).relu(),
    "divided by the number zero": lambda x: x.sum(0) / 2 / 0.0,
    "divided by the integer zero": lambda x: x.sum(0) / 0,
    "divided by the negative zero": lambda x: x.mean(0).div(-0.0),
    "divided in place": lambda x: x.sum(0).div_(0),
    "times infinity": lambda x: x.sum(0) * inf,
    "times another infinity": lambda x: (-inf) * (x.sum(0) * 2.0),
    "times infinity in place": lambda x: x.sum(0).mul_(inf),
    "times not a number": lambda x: x.sum(0) * nan,
    "times zero": lambda x: x.sum(0) * 0.0,
    "plus infinite multiples": lambda x: torch.add(x.sum(0), x.sum(0), alpha=inf),
    "minus infinite multiples": lambda x: torch.sub(x.sum(0), x.sum(0), alpha=-inf),
    "addcmul": lambda x: torch.addcmul(x.sum(0), x.sum(0), torch.ones(4), value=inf),
    "addcdiv": lambda x: torch.addcdiv(x.sum(0), x.sum(0), torch.zeros(4)),
    "lerp": lambda x: torch.lerp(x.sum(0), 2 * x.sum(0), inf),
    "lists times infinity": lambda x: torch._foreach_mul([x.sum(0)], inf)[0],
    "lists times zero": lambda x: torch._foreach_mul([x.sum(0)], 0.0)[0],
    "lists times numbers": lambda x: torch.stack(torch._foreach_mul([x.sum(0)] * 3, [2.0, inf, nan])),
    "lists times other numbers": lambda x: torch.stack(torch._foreach_mul([x.sum(0)] * 3, [inf, 2.0, -inf])),
    "lists divided by zero": lambda x: torch._foreach_div([x.sum(0)], 0)[0],
    "lists divided by numbers": lambda x: torch.stack(torch._foreach_div([x.sum(0)] * 2, [2.0, 0.0])),
    "lists plus infinite multiples": lambda x: torch._foreach_add([x.sum(0)], [x.sum(0)], alpha=inf)[0],
    "lists of addcmul": lambda x: torch._foreach_addcmul([x.sum(0)], [x.sum(0)], [torch.ones(4)], value=inf)[0],
    "lists of addcmul with numbers": lambda x: torch.stack(
        torch._foreach_addcmul([x.sum(0)] * 2, [x.sum(0)] * 2, [torch.ones(4)] * 2, [2.0, -inf])
    ),
    "lists of lerp": lambda x: torch._foreach_lerp([x.sum(0)], [2 * x.sum(0)], inf)[0],
    "lists in place": lambda x: _in_place(x.sum(0), x.sum(0)),
}


def _in_place(*tensors: Tensor) -> Tensor:
    torch._foreach_mul_(tensors, [inf, 2.0])
    torch._foreach_div_(tensors, [2.0, 0.0])
    return torch.stack(tensors)


def compare(fn: Callable[[Tensor], Tensor], x: Tensor) -> None:
    wanted = fn(x)
    for sizes in ((2,), (4,), (2, 2)):
        with ranks(*sizes) as mesh, torch.no_grad():
            for placements in [(Shard(0),)] if len(sizes) == 1 else [(Shard(0), Shard(0)), (Shard(0), Shard(1))]:
                with shardwise.experimental.implicit_replication():
                    found = fn(on(mesh, x, *placements))
                torch.testing.assert_close(whole(found), wanted, equal_nan=True)


@pytest.mark.parametrize("name", EXTREMES)
def test_a_maximum_of_anything(name: str) -> None:
    compare(EXTREMES[name], FLOATS)


@pytest.mark.parametrize("name", WRAPPING)
def test_integers_that_wrap_around(name: str) -> None:
    compare(WRAPPING[name], INTEGERS)


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_that_meets_zero(name: str) -> None:
    compare(SUMS[name], torch.tensor([[1.0, -3.0, 0.0, 2.0], [-5.0, 4.0, 0.0, -2.0], [1, 1, 0, 0], [2, 2, 0, 0]]))


@pytest.mark.parametrize(
    ("source", "target"), [("float32", "float16"), ("float32", "bfloat16"), ("float16", "float32")]
)
def test_a_sum_is_rounded_once_and_overflows_where_one_device_does(source: str, target: str) -> None:
    wide, narrow = getattr(torch, source), getattr(torch, target)
    x = torch.tensor([[60000.0, 1000.5, 3e4], [60000.0, -1000.0, 3e4]], dtype=wide)
    value = x.sum(0)
    with ranks(2) as mesh:
        distributed = on(mesh, x, Shard(0)).sum(0)
        assert distributed.placements == (Partial(),)
        torch.testing.assert_close(whole(distributed.to(narrow)), value.to(narrow), rtol=0, atol=0)


def test_which_dtypes_sum_alike() -> None:
    assert sums_alike(torch.int32, torch.int32)
    assert sums_alike(torch.complex64, torch.float32)
    for source, target in [("float16", "float32"), ("float64", "float32"), ("bool", "int64"), ("int64", "float64")]:
        assert not sums_alike(getattr(torch, source), getattr(torch, target))


def test_operands_that_are_reduced_first_do_not_pass() -> None:
    bound = bind(parse("a?, a? -> a ; linear 0 | 1 ; monotone 0"), [(4,), (4,)])
    assert len(passes(bound, "sum")) == 2
    changed = bound._replace(reduced_first=frozenset({0}))
    assert [passing.operands for passing in passes(changed, "avg")] == [(1,)]
    assert len(passes(changed, "max")) == 1


def test_what_is_worth_passing_still_passes() -> None:
    """A sum of scaled and added products is reduced once."""
    with ranks(2) as mesh:
        x = on(mesh, torch.randn(4, 6), Shard(0))
        scale = on(mesh, torch.randn(6))
        assert communication(lambda: (x.sum(0) * 0.5 - x.sum(0) / 3 + -x.mean(0)) * scale) == []
        assert communication(lambda: torch.maximum(x.amax(0), -x.amin(0)).view(2, 3)) == []
        for number in (2, 0.25, -1e30, 0.0, 0):
            assert communication(lambda number=number: x.sum(0) * number) == []
        for number in (2, 0.25, -1e30, inf):
            assert communication(lambda number=number: x.sum(0) / number) == []
        half = x.to(torch.bfloat16)
        assert communication(lambda: half.sum(0).float()) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_rows_keep_the_sign_of_zero(dtype: torch.dtype) -> None:
    x = torch.tensor([[-0.0, 0.0], [1.0, -0.0], [-0.0, nan], [0.0, -inf]], dtype=dtype)
    index = torch.tensor([2, 0, 1])
    functions: list[Callable[[Any, Any], Any]] = [
        lambda x, i: x[0],
        lambda x, i: x[3],
        lambda x, i: x[i],
        lambda x, i: x.index_select(0, i),
        lambda x, i: torch.nn.functional.embedding(i, x),
        lambda x, i: x.unbind(0)[2],
    ]
    with ranks(2) as mesh:
        given, rows = on(mesh, x, Shard(0)), on(mesh, index)
        for fn in functions:
            wanted, found = fn(x, index), assemble(fn(given, rows).redistribute(placements=[Shard(0)]))
            torch.testing.assert_close(found, wanted, equal_nan=True)
            parts = (torch.view_as_real(found), torch.view_as_real(wanted)) if dtype.is_complex else (found, wanted)
            numbers = ~parts[1].isnan()
            assert torch.equal(parts[0].signbit()[numbers], parts[1].signbit()[numbers])
        replicated = on(mesh, x).redistribute(placements=[Partial()]).redistribute(placements=[Shard(0)])
        assert not dtype.is_floating_point or torch.equal(assemble(replicated).signbit(), x.signbit())


@pytest.mark.parametrize("op", ["sum", "max", "min"])
def test_operands_contain_what_breaks_rules(op: str) -> None:
    generator = torch.Generator().manual_seed(0)
    value = torch.tensor([nan, inf, -inf, 0.0]).repeat(32)
    parts = torch.stack(operands(value, 3, op, generator))
    reduced = parts.sum(0) if op == "sum" else parts.amax(0) if op == "max" else parts.amin(0)
    torch.testing.assert_close(reduced, value, equal_nan=True)
    assert parts[:, value.isnan()].isfinite().any()
    if op == "sum":
        assert (parts[:, value.isnan()].isnan().sum(0) == 0).any()  # inf - inf
        integers = operands(torch.zeros(64, dtype=torch.int32), 3, "sum", generator)
        assert sum(part.long() for part in integers).any()


def test_sums_over_two_of_three_axes_stay_open():
    with mesh_of(2, 2, 2) as mesh:
        x = DTensor.from_local(torch.ones(8, 16), mesh, [Partial(), Partial(), Shard(0)])
        with explicit():  # refuses all communication
            for result in (x.clone(), x.detach(), x + x, x * 2, x.t()):
                assert isinstance(result.placements[0], Partial)
                assert isinstance(result.placements[1], Partial)
