# mypy: ignore-errors
"""The kernels of `triton_fill`, in Triton's language. Each function says what it is the same as."""

import triton
import triton.language as tl

from . import normal as constants
from .bits import GOLDEN, MIX_1, MIX_2

UNIFORM, NORMAL, BERNOULLI, INTEGERS, EXPONENTIAL = range(5)
EACH, NONE, ENDS = range(3)

_golden, _mix_1, _mix_2 = tl.constexpr(GOLDEN), tl.constexpr(MIX_1), tl.constexpr(MIX_2)
_sqrt_half, _log_2 = tl.constexpr(constants.SQRT_HALF_BITS), tl.constexpr(constants.LOG_2)
_sign, _magnitude = tl.constexpr(constants.SIGN), tl.constexpr(constants.MAGNITUDE)
_l0, _l1, _l2, _l3 = (tl.constexpr(c) for c in constants.LOG)
_c0, _c1, _c2, _c3, _c4 = (tl.constexpr(c) for c in constants.HALF_TURN_COS)
_s0, _s1, _s2, _s3, _s4 = (tl.constexpr(c) for c in constants.HALF_TURN_SIN)
_uniform_kind, _normal_kind = tl.constexpr(UNIFORM), tl.constexpr(NORMAL)
_bernoulli_kind, _exponential_kind = tl.constexpr(BERNOULLI), tl.constexpr(EXPONENTIAL)
_each, _ends = tl.constexpr(EACH), tl.constexpr(ENDS)
_per_turn = tl.constexpr(2.0**-31)


@triton.jit
def _start(row, n1, n2, s0, s1, s2, offset, DIMS: tl.constexpr):
    """The global index at which a row of the last dim starts."""
    start = row.to(tl.int64) * s2 + offset
    if DIMS > 2:
        start = (row % n2).to(tl.int64) * s2 + offset
        row = row // n2
        start += (row % n1).to(tl.int64) * s1
        start += (row // n1).to(tl.int64) * s0
    return start


@triton.jit
def _places(
    count, n1, n2, n3, s0, s1, s2, s3, offset, blocks, DIMS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """The local place of each element, its global index, and whether there is one.

    With ROWS a program works in one row of the last dim: what divides is one number, not one for each element.
    """
    if ROWS:
        row = tl.program_id(0) // blocks
        column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
        inside = column < n3
        place = row.to(tl.int64) * n3 + column
    else:
        place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = place < count
        row = place // n3
        column = place % n3
    return place, _start(row, n1, n2, s0, s1, s2, offset, DIMS) + column.to(tl.int64) * s3, inside


@triton.jit
def _words(counter, first, second):
    """The two words of each counter: `bits.mix`."""
    state = counter.to(tl.uint64) * _golden + first.to(tl.uint64)
    state = (state ^ (state >> 30)) * _mix_1
    state = state ^ second.to(tl.uint64)
    state = (state ^ (state >> 27)) * _mix_2
    state = state ^ (state >> 31)
    return state.to(tl.uint32).to(tl.int32, bitcast=True), (state >> 32).to(tl.uint32).to(tl.int32, bitcast=True)


@triton.jit
def _minus_two_log(word):
    """`normal.minus_two_log`."""
    u = ((word & _magnitude).to(tl.float32) + 0.5) * _per_turn
    bits = u.to(tl.int32, bitcast=True)
    exponent = (bits - _sqrt_half) >> 23
    mantissa = (bits - (exponent << 23)).to(tl.float32, bitcast=True)
    ratio = tl.div_rn(mantissa - 1.0, mantissa + 1.0)
    square = ratio * ratio
    value = (((square * _l3 + _l2) * square + _l1) * square + _l0) * ratio
    return value + exponent.to(tl.float32) * _log_2


@triton.jit
def _normal_pair(low, high):
    """`normal.normal_pairs`."""
    radius = tl.sqrt_rn(_minus_two_log(high))
    radius = (radius.to(tl.int32, bitcast=True) ^ (high & _sign)).to(tl.float32, bitcast=True)
    angle = low.to(tl.float32) * _per_turn
    square = angle * angle
    cos = (((square * _c4 + _c3) * square + _c2) * square + _c1) * square + _c0
    sin = ((((square * _s4 + _s3) * square + _s2) * square + _s1) * square + _s0) * angle
    return cos * radius, sin * radius


@triton.jit
def _number(word, scale, plus, KIND: tl.constexpr, BITS: tl.constexpr):
    """A number from one word: those of `fill`."""
    if _uniform_kind == KIND:
        fraction = (word >> (32 - BITS)).to(tl.float32) * (1.0 / (1 << BITS)) + 0.5
        return fraction * scale + plus
    elif _bernoulli_kind == KIND:
        return (word < scale).to(tl.float32)
    elif _exponential_kind == KIND:
        return tl.div_rn(_minus_two_log(word) * 0.5, scale)
    else:
        unsigned = word.to(tl.int64) & 0xFFFFFFFF
        return ((unsigned * scale) >> 32) + plus


@triton.jit(do_not_specialize=["first", "second", "offset", "scale", "plus"])
def fill(
    out,
    first,
    second,
    count,
    n1,
    n2,
    n3,
    s0,
    s1,
    s2,
    s3,
    offset,
    blocks,
    scale,
    plus,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    DIMS: tl.constexpr,
    ROWS: tl.constexpr,
    HALVES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Numbers of one kind at the indices of a box.

    HALVES: EACH element makes the pair it is in; NONE: a box of whole pairs, counted in pairs; ENDS: rows of pairs,
    of which the first and the last may stick out.
    """
    if _ends == HALVES:
        row = tl.program_id(0) // blocks
        pair = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
        start = _start(row, n1, n2, s0, s1, s2, offset, DIMS)
        counter = (start >> 1) + pair
    else:
        place, index, inside = _places(count, n1, n2, n3, s0, s1, s2, s3, offset, blocks, DIMS, ROWS, BLOCK)
        counter = index >> 1 if _each == HALVES else index
    low, high = _words(counter, first, second)
    if _normal_kind == KIND:
        even, odd = _normal_pair(low, high)
        even = even * scale + plus
        odd = odd * scale + plus
    elif _each != HALVES:
        even = _number(low, scale, plus, KIND, BITS)
        odd = _number(high, scale, plus, KIND, BITS)
    if _each == HALVES:
        is_odd = (index & 1) == 1
        if _normal_kind == KIND:
            value = tl.where(is_odd, odd, even)
        else:
            value = _number(tl.where(is_odd, high, low), scale, plus, KIND, BITS)
        tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)
    elif _ends == HALVES:
        column = 2 * pair - (start & 1)
        where = row.to(tl.int64) * n3 + column
        tl.store(out + where, even.to(out.dtype.element_ty), mask=(column >= 0) & (column < n3))
        tl.store(out + where + 1, odd.to(out.dtype.element_ty), mask=column + 1 < n3)
    else:
        both = tl.join(even, odd).to(out.dtype.element_ty)
        where = 2 * place[:, None] + tl.arange(0, 2)[None, :]
        tl.store(out + where, both, mask=inside[:, None])


@triton.jit(do_not_specialize=["first", "second", "offset", "limit", "scale"])
def dropout(
    x,
    out,
    kept,
    first,
    second,
    count,
    n1,
    n2,
    n3,
    s0,
    s1,
    s2,
    s3,
    offset,
    blocks,
    limit,
    scale,
    DIMS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What is left of x, and where. Each element makes its own word: pairs would lie badly for reading x."""
    place, index, inside = _places(count, n1, n2, n3, s0, s1, s2, s3, offset, blocks, DIMS, ROWS, BLOCK)
    low, high = _words(index >> 1, first, second)
    keep = tl.where((index & 1) == 1, high, low) < limit
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    value = value * keep.to(tl.float32) * scale
    tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)
    tl.store(kept + place, keep.to(tl.uint8), mask=inside)
