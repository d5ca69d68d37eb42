# mypy: ignore-errors
"""The kernels of `triton_fill`, in Triton's language. Each docstring names the PyTorch code that computes the same."""

import triton
import triton.language as tl

from . import normal as constants
from .bits import GOLDEN, MIX_1, MIX_2

UNIFORM, NORMAL, BERNOULLI, INTEGERS, EXPONENTIAL = range(5)

_golden, _mix_1, _mix_2 = tl.constexpr(GOLDEN), tl.constexpr(MIX_1), tl.constexpr(MIX_2)
_sqrt_half, _log_2 = tl.constexpr(constants.SQRT_HALF_BITS), tl.constexpr(constants.LOG_2)
_sign, _magnitude = tl.constexpr(constants.SIGN), tl.constexpr(constants.MAGNITUDE)
_l0, _l1, _l2, _l3 = (tl.constexpr(c) for c in constants.LOG)
_c0, _c1, _c2, _c3, _c4 = (tl.constexpr(c) for c in constants.HALF_TURN_COS)
_s0, _s1, _s2, _s3, _s4 = (tl.constexpr(c) for c in constants.HALF_TURN_SIN)
_uniform_kind, _normal_kind = tl.constexpr(UNIFORM), tl.constexpr(NORMAL)
_bernoulli_kind, _exponential_kind = tl.constexpr(BERNOULLI), tl.constexpr(EXPONENTIAL)
_per_turn, _unit = tl.constexpr(2.0**-31), tl.constexpr(constants.UNIT)


@triton.jit
def _start(row, n1, n2, s0, s1, s2, offset, DIMS: tl.constexpr):
    """Return the global index at which a row of the last dim starts."""
    if DIMS == 1:
        return row.to(tl.int64) + offset  # there is one row
    elif DIMS == 2:
        return row.to(tl.int64) * s2 + offset
    else:
        middle = row // n2
        start = (row % n2).to(tl.int64) * s2 + offset
        return start + (middle % n1).to(tl.int64) * s1 + (middle // n1).to(tl.int64) * s0


@triton.jit
def _elements(
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
    DIMS: tl.constexpr,
    ROWS: tl.constexpr,
    EVEN: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return for each element: its local index, whether it exists, its counter, and whether it is the second of a pair.

    With ROWS a program works in one row of the last dim: it divides once, not once for each element. With EVEN all rows
    start with the first number of a pair: the compiler then knows which number is which and computes each pair once.
    `n3` is given in units of ALIGN, so that the compiler knows how addresses are aligned.
    """
    length = n3 * ALIGN
    if ROWS:
        row = tl.program_id(0) // blocks
        column = (tl.program_id(0) - row * blocks) * BLOCK + tl.arange(0, BLOCK)
        place = row * length + column
        inside = column < length
    else:
        place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = place < count
        row = place // length
        column = place - row * length
    start = _start(row, n1, n2, s0, s1, s2, offset, DIMS)
    if EVEN:
        counter = (start >> 1) + (column >> 1).to(tl.int64)
        odd = (column & 1) == 1
    else:
        index = start + column.to(tl.int64) * s3
        counter = index >> 1
        odd = (index & 1) == 1
    return place, inside, counter, odd


@triton.jit
def _words(counter, first, second):
    """Return the two words of each counter, as `bits.mix`."""
    state = counter.to(tl.uint64) * _golden + first.to(tl.uint64)
    state = (state ^ (state >> 30)) * _mix_1
    state = state ^ second.to(tl.uint64)
    state = (state ^ (state >> 27)) * _mix_2
    state = state ^ (state >> 31)
    return state.to(tl.uint32).to(tl.int32, bitcast=True), (state >> 32).to(tl.uint32).to(tl.int32, bitcast=True)


@triton.jit
def _minus_two_log(word):
    """Compute the same as `normal.minus_two_log`."""
    u = ((word & _magnitude).to(tl.float32) + 0.5) * _unit
    bits = u.to(tl.int32, bitcast=True)
    exponent = (bits - _sqrt_half) >> 23
    mantissa = (bits - (exponent << 23)).to(tl.float32, bitcast=True)
    ratio = tl.div_rn(mantissa - 1.0, mantissa + 1.0)
    square = ratio * ratio
    value = (((square * _l3 + _l2) * square + _l1) * square + _l0) * ratio
    return value + exponent.to(tl.float32) * _log_2


@triton.jit
def _normal_pair(low, high):
    """Compute the same as `normal.normal_pairs`."""
    radius = _minus_two_log(high)
    radius = radius * tl.div_rn(1.0, tl.sqrt_rn(radius))
    radius = (radius.to(tl.int32, bitcast=True) ^ (high & _sign)).to(tl.float32, bitcast=True)
    angle = low.to(tl.float32) * _per_turn
    square = angle * angle
    cos = (((square * _c4 + _c3) * square + _c2) * square + _c1) * square + _c0
    sin = ((((square * _s4 + _s3) * square + _s2) * square + _s1) * square + _s0) * angle
    return cos * radius, sin * radius


@triton.jit
def _number(word, scale, plus, KIND: tl.constexpr, BITS: tl.constexpr):
    """Return the number that one word gives, as the functions of `fill`."""
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
    EVEN: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write numbers of one kind at the indices of a box."""
    place, inside, counter, odd = _elements(
        count, n1, n2, n3, s0, s1, s2, s3, offset, blocks, DIMS, ROWS, EVEN, ALIGN, BLOCK
    )
    low, high = _words(counter, first, second)
    if _normal_kind == KIND:
        x, y = _normal_pair(low, high)
        value = tl.where(odd, y, x) * scale + plus
    else:
        value = _number(tl.where(odd, high, low), scale, plus, KIND, BITS)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)


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
    EVEN: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write x with dropped elements set to 0, scaled, and the mask of those kept: `bernoulli_` and a product."""
    place, inside, counter, odd = _elements(
        count, n1, n2, n3, s0, s1, s2, s3, offset, blocks, DIMS, ROWS, EVEN, ALIGN, BLOCK
    )
    low, high = _words(counter, first, second)
    keep = tl.where(odd, high, low) < limit
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    value = value * keep.to(tl.float32) * scale
    tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)
    tl.store(kept + place, keep.to(tl.uint8), mask=inside)
