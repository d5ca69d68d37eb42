"""Elementwise ops: broadcasting, Partial operands of every kind, dtypes, in-place and out= variants."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardwise import Partial, Replicate, Shard
from shardwise.errors import InputError
from tests.ops.helpers import check_case, communication, no_communication, on, r, ranks, table, whole

x, y, row = r(5, 4), r(5, 4, seed=1), r(4, seed=2)
positive = r(5, 4).abs() + 0.1
unit = torch.sigmoid(r(5, 4)) * 0.8 + 0.1
integers, counts = r(5, 4, dtype=torch.int64), r(4, dtype=torch.int64).abs() + 1
small = r(5, 4, dtype=torch.int64).abs().to(torch.uint8)
mask = x > 0
half = r(5, 4, dtype=torch.bfloat16)
number = r(seed=3)
z = r(5, 4, dtype=torch.complex64)

TWO = "add sub mul maximum minimum fmax fmin atan2 hypot copysign logaddexp xlogy eq ne lt ge logical_and logical_xor"
SIGNED = "abs atan asinh ceil cos deg2rad erf exp expm1 floor frac isnan neg positive relu round sigmoid sign signbit"
ON_UNIT = "acos atanh digamma erfinv log log1p logit reciprocal rsqrt sqrt"
ACTIVATIONS = (
    "relu6 elu selu celu gelu silu mish hardtanh hardswish hardsigmoid softplus softsign leaky_relu logsigmoid "
    "tanhshrink hardshrink softshrink glu"
)
INTEGERS = "add sub mul maximum bitwise_and bitwise_xor bitwise_left_shift gcd floor_divide remainder eq true_divide"
COMPLEX = "conj real imag abs angle conj_physical view_as_real exp sgn neg isreal"

CASES: list[Any] = [
    *((name, getattr(torch, name), (x, row)) for name in TWO.split()),
    *((name, getattr(torch, name), (x,)) for name in SIGNED.split()),
    *((name, getattr(torch, name), (unit,)) for name in ON_UNIT.split()),
    *((name, getattr(F, name), (x,)) for name in ACTIVATIONS.split()),
    *((f"integers {name}", getattr(torch, name), (integers, counts)) for name in INTEGERS.split()),
    *((f"complex {name}", getattr(torch, name), (z,)) for name in COMPLEX.split()),
    ("div", torch.div, (x, row.abs() + 1)),
    ("div by floor", lambda a, b: torch.div(a, b, rounding_mode="floor"), (x, row.abs() + 1)),
    ("add with alpha", lambda a, b: torch.add(a, b, alpha=-2), (x, row)),
    ("add a number", lambda a: a + 2, (x,)),
    ("times a negative number", lambda a: a * -2, (x,)),
    ("number minus", lambda a: 2 - a, (x,)),
    ("number over", lambda a: 1 / a, (positive,)),
    ("power", lambda a, b: a**b, (positive, row)),
    ("where", torch.where, (mask, x, row)),
    ("where with a number", lambda a: torch.where(a > 0, a, 1.0), (x,)),
    ("masked_fill", lambda a, m: a.masked_fill(m, 2.5), (x, mask)),
    ("masked_fill with a tensor", lambda a, m, v: a.masked_fill(m, v), (x, mask, number)),
    ("lerp", lambda a, b: torch.lerp(a, b, 0.3), (x, y)),
    ("lerp with a tensor", torch.lerp, (x, y, unit)),
    ("addcmul", lambda a, b, c: torch.addcmul(a, b, c, value=0.5), (x, y, row)),
    ("addcdiv", lambda a, b, c: torch.addcdiv(a, b, c, value=0.5), (x, y, positive)),
    ("clamp", lambda a: a.clamp(-0.5, 0.5), (x,)),
    ("clamp from below", lambda a: a.clamp(min=0.1), (x,)),
    ("clamp with tensors", torch.clamp, (x, row - 1, y + 1)),
    ("clamp_min with a tensor", torch.clamp_min, (x, row)),
    ("prelu", F.prelu, (r(3, 4, 2), row)),
    ("isin", torch.isin, (integers, counts)),
    ("isin a number", lambda a: torch.isin(a, 2), (integers,)),
    ("a number isin", lambda a: torch.isin(2, a), (integers,)),
    ("frexp", lambda a: torch.frexp(a.detach()), (x,)),
    ("bools", lambda a: ~a | a, (mask,)),
    ("integers and floats", torch.add, (integers, x)),
    ("unsigned", lambda a, b: -a + b, (small, integers)),
    ("half", lambda a, b: a * b.tanh(), (half, half)),
    ("numbers", lambda a, b: a * b + a, (number, x)),
    ("no elements", lambda a, b: a + b, (r(0, 4), row)),
    ("conjugate product", lambda a: a @ a.mH, (z,)),
    ("imaginary part of a conjugate", lambda a: a.conj().imag, (z,)),
    ("polar", lambda a, b: torch.polar(a, b), (positive, x)),
    ("complex of parts", torch.complex, (x, y)),
    ("cast to half", lambda a: a.to(torch.bfloat16).float().round(), (x.round(),)),
    ("cast to integers", lambda a: (a * 3).round().int(), (x.round(),)),
    ("cast of integers", lambda a: a.float(), (integers,)),
    ("cast to complex", lambda a: a.to(torch.complex64), (x,)),
    ("zeros_like", torch.zeros_like, (x,)),
    ("full_like", lambda a: torch.full_like(a, 3), (x,)),
]


@table(CASES)
def test_any_placement_gives_the_one_device_answer(fn: Any, args: Any) -> None:
    ordered = not any(tensor.is_complex() for tensor in args)
    check_case(fn, args, limit=2, partial=("sum", "max", "min") if ordered else ("sum",), meshes=((4,), (2, 2)))


WRITES: list[Any] = [
    ("add_", lambda a, b: a.add_(b), (x, row)),
    ("sub_ with alpha", lambda a, b: a.sub_(b, alpha=2), (x, y)),
    ("mul_", lambda a, b: a.mul_(b), (x, row)),
    ("div_", lambda a: a.div_(2), (x,)),
    ("neg_", lambda a: a.neg_(), (x,)),
    ("clamp_", lambda a: a.clamp_(-1, 1), (x,)),
    ("addcmul_", lambda a, b, c: a.addcmul_(b, c), (x, y, row)),
    ("masked_fill_", lambda a, m: a.masked_fill_(m, 2.5), (x, row > 0)),
    ("fill_", lambda a: a.fill_(3.0), (x,)),
    ("fill_ with a tensor", lambda a, v: a.fill_(v), (x, number)),
    ("zero_", lambda a: a.zero_(), (x,)),
    ("copy_", lambda a, b: a.copy_(b), (x, row)),
    ("copy_ of integers", lambda a, b: a.copy_(b), (x, integers)),
]


@table(WRITES)
def test_writing_in_place(fn: Any, args: Any) -> None:
    check_case(fn, args, limit=3, partial=("sum", "max"), meshes=((4,), (2, 2)))


@pytest.mark.parametrize("op", [torch.add, torch.mul, torch.maximum, torch.mm], ids=lambda op: op.__name__)
def test_writing_into_out(op: Any) -> None:
    args = (x, r(4, 3), r(5, 3)) if op is torch.mm else (x, row, y)
    check_case(lambda a, b, out: op(a, b, out=out), args, limit=12, grad=False, meshes=((3,), (2, 2)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_a_factory_makes_is_written_into_out(dtype: torch.dtype) -> None:
    with ranks(2, 2) as mesh:
        for placements in ((Shard(0), Shard(1)), (Shard(1), Shard(1)), (Replicate(), Replicate())):
            square = on(mesh, r(6, 5).to(dtype), *placements)
            torch.nn.init.eye_(square)
            assert torch.equal(whole(square), torch.eye(6, 5, dtype=dtype))
            assert square.placements == placements
            line = square.new_empty(7)
            assert torch.linspace(0, 1, 7, out=line) is line
            assert torch.equal(whole(line), torch.linspace(0, 1, 7, dtype=dtype))
            with pytest.raises(InputError, match=r"out.normal_\(\)"):
                torch.rand(6, 5, out=square)


def test_errors_of_type_promotion_are_the_one_device_ones() -> None:
    with ranks(2) as mesh:
        target = on(mesh, integers, Shard(0))
        with pytest.raises(RuntimeError, match="can't be cast"):
            target.mul_(0.5)
        with pytest.raises(RuntimeError, match="must match the size"):
            on(mesh, x, Shard(0)).add(on(mesh, r(3), Replicate()))


def test_minima_do_not_pass_through_maximum_together() -> None:
    with ranks(2) as mesh:
        a, b = (on(mesh, value, Partial("min")) for value in (x, y))
        torch.testing.assert_close(whole(torch.maximum(a, b)), torch.maximum(x, y))
        c, d = (on(mesh, value, Partial("max")) for value in (x, y))
        with no_communication():
            assert torch.maximum(c, d).placements == (Partial("max"),)


def test_sums_pass_where_the_op_is_linear() -> None:
    with ranks(2) as mesh:
        a, b = (on(mesh, value, Partial()) for value in (x, y))
        scale = on(mesh, row, Replicate())
        assert not communication(lambda: (a + b) * scale - a / 2)
        assert communication(lambda: a + 1)
        assert communication(lambda: a * b)


def test_an_interleaved_cut_is_followed_as_it_is() -> None:
    with ranks(4) as mesh:
        a = on(mesh, r(2, 5, 3), Shard(1)).flatten(0, 1)
        b = on(mesh, r(10, 3), Replicate())
        with no_communication():
            result = (a * b).exp().unflatten(0, (2, 5))
        assert result.placements == (Shard(1),)
        torch.testing.assert_close(whole(result), (r(2, 5, 3) * r(10, 3).view(2, 5, 3)).exp())


@pytest.mark.parametrize("fn", [lambda x: x + 2j, lambda x: x.to(torch.complex64)], ids=["add", "to"])
def test_a_maximum_does_not_become_complex(fn: Any) -> None:
    """Complex numbers have no order, so the maximum is taken before."""
    check_case(fn, (r(5, 3),), partial=("max", "min"), limit=20)


PRIMS_OF_ONE = "abs bessel_i0e bessel_i1 bessel_j0 cbrt erfcx exp ndtri spherical_bessel_j0"


def test_prims_are_elementwise_as_the_ops_they_stand_for() -> None:
    with ranks(2) as mesh:
        a, b = (on(mesh, value, Shard(0)) for value in (unit, positive))
        for name in PRIMS_OF_ONE.split():
            op = getattr(torch.ops.prims, name)
            with no_communication():
                found = op(a)
            torch.testing.assert_close(whole(found), op(unit))
        for name in ("div", "ne", "fmod", "pow", "gt"):
            op = getattr(torch.ops.prims, name)
            with no_communication():
                found = op(a, b)
            assert found.placements == (Shard(0),)
            torch.testing.assert_close(whole(found), op(unit, positive))


def test_an_alias_by_prims_shares_memory() -> None:
    with ranks(2) as mesh:
        a = on(mesh, x, Shard(0))
        alias = torch.ops.prims.view_of(a)
        assert alias.placements == (Shard(0),)
        alias.zero_()
        torch.testing.assert_close(whole(a), torch.zeros_like(x))


NEW: list[Any] = [
    ("zeros_like", torch.zeros_like),
    ("ones_like", torch.ones_like),
    ("empty_like", torch.empty_like),
    ("new_empty", lambda a: a.new_empty(a.shape)),
    ("new_empty_strided", lambda a: a.new_empty_strided(a.shape, a.stride())),
    ("new_zeros of another shape", lambda a: a.new_zeros(3)),
]


@pytest.mark.parametrize("reduction", ["sum", "avg", "max", "min"])
@pytest.mark.parametrize(("name", "make"), NEW, ids=[name for name, _ in NEW])
def test_new_tensors_like_a_partial_one_communicate_nothing(name: str, make: Any, reduction: str) -> None:
    with ranks(2) as mesh:
        like = on(mesh, x, Partial(reduction))
        with no_communication():
            made = make(like)
        assert made.shape == make(x).shape
        if "empty" not in name:
            torch.testing.assert_close(whole(made), make(x))
