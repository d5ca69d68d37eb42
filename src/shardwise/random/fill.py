"""Numbers by index: what each in-place random op of PyTorch writes, as a function of a key and global indices.

A counter gives 64 bits. Where a number takes 32 bits, counter c gives those at the indices 2c and 2c + 1. Where it
takes more (float64, wide ranges of integers), it gives the one at index c. Only the numbers of this rank's box are
computed, in pieces that stay in the CPU's cache.

>>> fill(torch.empty(3, 4), box, key, "normal_", (0.0, 1.0))
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from . import triton_fill
from .bits import Key, mix, threshold
from .box import Box, counters
from .normal import minus_two_log, normal_pairs

Arguments = tuple[float, ...]
"""The arguments of an in-place random op after the tensor: `(mean, std)` of `normal_`."""

Maker = Callable[[Tensor, Key, Tensor], object]
"""Writes the numbers of some counters, one or two for each, to its last argument; may overwrite the counters."""

_IN_CACHE, _AT_ONCE = 1 << 17, 1 << 24  # counters in a piece, on a CPU and on other devices
_NARROW_RANGE = 1 << 20  # up to here, 32 bits give integers that are uniform enough
_FRACTION = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def fill(out: Tensor, box: Box, key: Key, name: str, arguments: Arguments) -> Tensor:
    """Fill a row-major tensor that holds the elements of this box, and return it."""
    if out.is_complex():
        return _fill_complex(out, box, key, name, arguments)
    if name == "random_":
        arguments = _range(out.dtype, *arguments)
    elif name == "native_dropout":
        name, arguments = "bernoulli_", (1.0 - arguments[0],)
    elif name in _DERIVED:
        base, parameters, finish = _DERIVED[name](*arguments)
        work = out if out.dtype == _float(out.dtype) else torch.empty_like(out, dtype=torch.float32)
        finished = finish(fill(work, box, key, base, parameters))
        return out if work is out else out.copy_(finished)
    if triton_fill.fill(out, box, key, name, arguments):
        return out
    pairs = _pairs(out.dtype, name, arguments)
    make = _MAKERS[name](out.dtype, *arguments)
    limit = _IN_CACHE if out.device.type == "cpu" else _AT_ONCE
    elements = out.view(box.sizes)
    if pairs:
        _fill_pairs(elements, box, key, make, limit)
        return out
    for place, piece in counters(box, limit, out.device):
        make(piece.view(-1), key, elements[place].view(-1))
    return out


def _fill_pairs(elements: Tensor, box: Box, key: Key, make: Maker, limit: int) -> None:
    """Fill a tensor of the box's sizes with numbers that are made in pairs, of which it may hold only one number."""
    if box.strides[-1] != 1:
        single = Box(box.offset, (*box.sizes, 1), (*box.strides, 1))
        return _fill_pairs(elements.unsqueeze(-1), single, key, make, limit)
    for dim, (size, stride) in enumerate(zip(box.sizes[:-1], box.strides, strict=False)):
        if size > 1 and stride % 2:  # rows start in turn at the first and at the second number of a pair
            for first in (0, 1):
                rows = elements[(*[slice(None)] * dim, slice(first, None, 2))]
                _fill_pairs(rows, box.every_other(dim, first), key, make, limit)
            return None
    skip, length = box.offset % 2, box.sizes[-1]
    halves = tuple(stride // 2 for stride in box.strides[:-1])
    touched = Box(box.offset // 2, (*box.sizes[:-1], (skip + length + 1) // 2), (*halves, 1))
    only_pairs = skip == 0 and length % 2 == 0 and elements.is_contiguous()
    for place, piece in counters(touched, limit, elements.device):
        if only_pairs:
            make(piece.view(-1), key, elements.view(*touched.sizes, 2)[place].view(-1))
            continue
        made = elements.new_empty((*piece.shape[:-1], 2 * piece.shape[-1]))
        make(piece.view(-1), key, made.view(-1))
        last = place[-1]
        if len(place) < elements.dim():
            elements[place] = made[..., skip : skip + length]
        elif isinstance(last, slice):  # a piece of one row
            begin, end = 2 * last.start - skip, min(2 * last.stop - skip, length)
            elements[place[:-1]][max(begin, 0) : end] = made[max(-begin, 0) : end - begin]
    return None


def _fill_complex(out: Tensor, box: Box, key: Key, name: str, arguments: Arguments) -> Tensor:
    """Fill real and imaginary parts as neighbouring elements. Those of a normal number have half its variance each."""
    parts = Box(2 * box.offset, (*box.sizes, 2), (*(2 * stride for stride in box.strides), 1))
    if name == "normal_":
        mean, std = arguments
        fill(torch.view_as_real(out), parts, key, name, (0.0, std / math.sqrt(2.0)))
        return out.add_(mean) if mean else out
    fill(torch.view_as_real(out), parts, key, name, arguments)
    return out


def _range(dtype: torch.dtype, *bounds: float | None) -> tuple[int, int]:
    """Return the range that `random_` draws from: by default all integers from 0 that the dtype represents.

    The first and the last integer are ones that it represents, so that no number is rounded to one out of range.
    """
    low, high = (0, *bounds) if len(bounds) == 1 else bounds or (0, None)
    if high is None:
        most = 2 if dtype is torch.bool else 0 if dtype.is_floating_point else torch.iinfo(dtype).max + 1
        high = most or 2 ** _FRACTION[dtype] + 1
    low, high = int(low or 0), int(high)
    if not dtype.is_floating_point:
        return low, high
    first, last = -_rounded_down(-low, dtype), _rounded_down(high - 1, dtype)
    return (first, last + 1) if first <= last else (low, high)


def _rounded_down(number: int, dtype: torch.dtype) -> int:
    """Return the largest integer up to this one that a floating-point dtype represents."""
    step = 1 << max(0, abs(number).bit_length() - _FRACTION[dtype])
    return number // step * step


def _pairs(dtype: torch.dtype, name: str, arguments: Arguments) -> bool:
    """Return whether a number takes 32 bits, so that a counter gives two."""
    if name == "random_":
        return bool(arguments[1] - arguments[0] <= _NARROW_RANGE)
    return name == "bernoulli_" or dtype != torch.float64


def _words(piece: Tensor, key: Key) -> Tensor:
    """Return two int32 words for each counter, low half first."""
    return mix(piece, key).view(torch.int32)


def _float(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to compute in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# ---- the distributions --------------------------------------------------------------------------------------------


def _fractions(piece: Tensor, key: Key, dtype: torch.dtype) -> Tensor:
    """Return numbers in [0, 1): multiples of the smallest power of two e for which the dtype holds 1 - e."""
    bits = _FRACTION.get(dtype, 24)
    drawn, width = (mix(piece, key), 64) if bits > 32 else (_words(piece, key), 32)
    return drawn.bitwise_right_shift_(width - bits).to(_float(dtype)).mul_(2.0**-bits).add_(0.5)


def _uniform(dtype: torch.dtype, low: float, high: float) -> Maker:
    def make(piece: Tensor, key: Key, out: Tensor) -> None:
        fractions = _fractions(piece, key, dtype)
        out.copy_(fractions if (low, high) == (0, 1) else fractions.mul_(high - low).add_(low))

    return make


def _standard_normal(piece: Tensor, key: Key, dtype: torch.dtype) -> Tensor:
    if dtype == torch.float64:
        angle = _fractions(piece.clone(), key.again(), dtype).mul_(2.0 * math.pi)
        return _exponential_of(piece, key, dtype).mul_(2.0).sqrt_().mul_(angle.cos_())
    words = _words(piece, key).view(-1, 2)
    return normal_pairs(words, torch.empty_like(words, dtype=torch.float32)).view(-1)


def _exponential_of(piece: Tensor, key: Key, dtype: torch.dtype) -> Tensor:
    """Return exponential numbers of mean 1."""
    if dtype == torch.float64:
        return _fractions(piece, key, dtype).neg_().log1p_().neg_()
    return minus_two_log(_words(piece, key)).mul_(0.5)


def _normal(dtype: torch.dtype, mean: float, std: float) -> Maker:
    return lambda piece, key, out: out.copy_(_scaled(_standard_normal(piece, key, dtype), std, mean))


def _scaled(numbers: Tensor, by: float, plus: float) -> Tensor:
    return numbers if (by, plus) == (1, 0) else numbers.mul_(by).add_(plus)


def _exponential(dtype: torch.dtype, rate: float) -> Maker:
    return lambda piece, key, out: out.copy_(_exponential_of(piece, key, dtype).div_(rate))


def _bernoulli(dtype: torch.dtype, p: float) -> Maker:
    def make(piece: Tensor, key: Key, out: Tensor) -> None:
        if p >= 1:
            out.fill_(1)
        else:
            out.copy_(_words(piece, key) < threshold(p))

    return make


def _integers(dtype: torch.dtype, low: int, high: int) -> Maker:
    span = high - low

    def narrow(piece: Tensor, key: Key, out: Tensor) -> None:
        unsigned = _words(piece, key).to(torch.int64).bitwise_and_(0xFFFFFFFF)
        out.copy_(unsigned.mul_(span).bitwise_right_shift_(32).add_(low))

    def wide(piece: Tensor, key: Key, out: Tensor) -> None:
        drawn = mix(piece, key)
        if span < 1 << 63:
            drawn.bitwise_right_shift_(1).bitwise_and_((1 << 63) - 1).remainder_(span).add_(low)
        elif span < 1 << 64:  # the remainder of an unsigned number, which is at most one span too large
            signed = span - (1 << 64)
            too_large = (drawn < 0) & (drawn >= signed)
            drawn.sub_(too_large * signed).add_(low)
        out.copy_(drawn)

    return narrow if span <= _NARROW_RANGE else wide


_MAKERS: dict[str, Callable[..., Maker]] = {
    "uniform_": _uniform,
    "normal_": _normal,
    "exponential_": _exponential,
    "bernoulli_": _bernoulli,
    "random_": _integers,
}
"""Distributions, named after the methods that fill a tensor with them. The record of an op names the one it draws."""


# ---- distributions computed from another one -------------------------------------------------------------------------


def _log_normal(mean: float, std: float) -> Derived:
    return "normal_", (mean, std), Tensor.exp_


def _geometric(p: float) -> Derived:
    """Return the number of trials until the first success; 1 for a probability of 1."""
    rate = -math.log1p(-p) if p < 1 else math.inf
    return "exponential_", (rate,), lambda drawn: drawn.ceil_().clamp_(min=1)


def _cauchy(median: float, sigma: float) -> Derived:
    return "uniform_", (-0.5, 0.5), lambda drawn: drawn.mul_(math.pi).tan_().mul_(sigma).add_(median)


Derived = tuple[str, tuple[float, ...], Callable[[Tensor], Tensor]]
_DERIVED: dict[str, Callable[..., Derived]] = {
    "log_normal_": _log_normal,
    "geometric_": _geometric,
    "cauchy_": _cauchy,
}
