# mypy: ignore-errors
"""The kernels of `triton_fill`, in Triton's language. Each function says what it is the same as."""

import triton
import triton.language as tl

from . import normal as constants
from .bits import GOLDEN, MIX_1, MIX_2

UNIFORM, NORMAL, BERNOULLI, INTEGERS = range(4)

_golden, _mix_1, _mix_2 = tl.constexpr(GOLDEN), tl.constexpr(MIX_1), tl.constexpr(MIX_2)
_sqrt_half, _log_2 = tl.constexpr(constants.SQRT_HALF_BITS), tl.constexpr(constants.LOG_2)
_sign, _magnitude = tl.constexpr(constants.SIGN), tl.constexpr(constants.MAGNITUDE)
_l0, _l1, _l2, _l3 = (tl.constexpr(c) for c in constants.LOG)
_c0, _c1, _c2, _c3, _c4 = (tl.constexpr(c) for c in constants.HALF_TURN_COS)
_s0, _s1, _s2, _s3, _s4 = (tl.constexpr(c) for c in constants.HALF_TURN_SIN)
_uniform_kind, _normal_kind = tl.constexpr(UNIFORM), tl.constexpr(NORMAL)
_bernoulli_kind = tl.constexpr(BERNOULLI)
_per_turn = tl.constexpr(2.0**-31)


@triton.jit
def _index(place, offset, n1, n2, n3, s0, s1, s2, s3, DIMS: tl.constexpr):
    """The global index of each local place."""
    index = tl.zeros_like(place).to(tl.int64) + offset
    if DIMS > 1:
        index += (place % n3).to(tl.int64) * s3
        place = place // n3
        if DIMS > 2:
            index += (place % n2).to(tl.int64) * s2
            place = place // n2
            if DIMS > 3:
                index += (place % n1).to(tl.int64) * s1
                place = place // n1
                index += place.to(tl.int64) * s0
            else:
                index += place.to(tl.int64) * s1
        else:
            index += place.to(tl.int64) * s2
    else:
        index += place.to(tl.int64) * s3
    return index


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
def _radius(word):
    """The square root of `normal.minus_two_log`, with the word's sign."""
    u = ((word & _magnitude).to(tl.float32) + 0.5) * _per_turn
    bits = u.to(tl.int32, bitcast=True)
    exponent = (bits - _sqrt_half) >> 23
    mantissa = (bits - (exponent << 23)).to(tl.float32, bitcast=True)
    ratio = tl.div_rn(mantissa - 1.0, mantissa + 1.0)
    square = ratio * ratio
    value = (((square * _l3 + _l2) * square + _l1) * square + _l0) * ratio
    radius = tl.sqrt_rn(value + exponent.to(tl.float32) * _log_2)
    return (radius.to(tl.int32, bitcast=True) ^ (word & _sign)).to(tl.float32, bitcast=True)


@triton.jit
def _normal_pair(low, high):
    """`normal.normal_pairs`."""
    radius = _radius(high)
    angle = low.to(tl.float32) * _per_turn
    square = angle * angle
    cos = (((square * _c4 + _c3) * square + _c2) * square + _c1) * square + _c0
    sin = ((((square * _s4 + _s3) * square + _s2) * square + _s1) * square + _s0) * angle
    return cos * radius, sin * radius


@triton.jit
def _number(word, scale, plus, KIND: tl.constexpr, BITS: tl.constexpr):
    """A number from one word."""
    if _uniform_kind == KIND:
        fraction = (word >> (32 - BITS)).to(tl.float32) * (1.0 / (1 << BITS)) + 0.5
        return fraction * scale + plus
    elif _bernoulli_kind == KIND:
        return (word < scale).to(tl.int32)
    else:
        unsigned = word.to(tl.int64) & 0xFFFFFFFF
        return ((unsigned * scale) >> 32) + plus


@triton.jit(do_not_specialize=["count", "first", "second", "offset", "scale", "plus"])
def fill(
    out,
    count,
    first,
    second,
    offset,
    n1,
    n2,
    n3,
    s0,
    s1,
    s2,
    s3,
    scale,
    plus,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    DIMS: tl.constexpr,
    PAIRED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Numbers of one kind at the indices of a box; with PAIRED it holds whole pairs, and counts them."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    index = _index(place, offset, n1, n2, n3, s0, s1, s2, s3, DIMS)
    counter = index if PAIRED else index >> 1
    low, high = _words(counter, first, second)
    if _normal_kind == KIND:
        even, odd = _normal_pair(low, high)
        even = even * scale + plus
        odd = odd * scale + plus
    else:
        even = _number(low, scale, plus, KIND, BITS)
        odd = _number(high, scale, plus, KIND, BITS)
    if PAIRED:
        where = tl.program_id(0).to(tl.int64) * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
        value = tl.interleave(even, odd)
        tl.store(out + where, value.to(out.dtype.element_ty), mask=where < 2 * count.to(tl.int64))
    else:
        value = tl.where((index & 1) == 1, odd, even)
        tl.store(out + place, value.to(out.dtype.element_ty), mask=place < count)


@triton.jit(do_not_specialize=["count", "first", "second", "offset", "limit", "scale"])
def dropout(
    x,
    out,
    kept,
    count,
    first,
    second,
    offset,
    n1,
    n2,
    n3,
    s0,
    s1,
    s2,
    s3,
    limit,
    scale,
    DIMS: tl.constexpr,
    PAIRED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What is left of x, and where: `bernoulli_` and a product."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    index = _index(place, offset, n1, n2, n3, s0, s1, s2, s3, DIMS)
    counter = index if PAIRED else index >> 1
    low, high = _words(counter, first, second)
    if PAIRED:
        where = tl.program_id(0).to(tl.int64) * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
        inside = where < 2 * count.to(tl.int64)
        word = tl.interleave(low, high)
    else:
        where = place.to(tl.int64)
        inside = place < count
        word = tl.where((index & 1) == 1, high, low)
    keep = word < limit
    value = tl.load(x + where, mask=inside, other=0.0).to(tl.float32)
    value = value * keep.to(tl.float32) * scale
    tl.store(out + where, value.to(out.dtype.element_ty), mask=inside)
    tl.store(kept + where, keep.to(tl.uint8), mask=inside)
