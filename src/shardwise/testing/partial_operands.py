"""Operands of a reduction: different tensors on every rank whose sum, average, product or extreme is a given value.

>>> one, two = operands(torch.tensor([5.0]), 2, "sum", torch.Generator().manual_seed(0))
>>> one + two
tensor([5.])
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import PlacementError


def operands(value: Tensor, count: int, op: str, generator: torch.Generator, unit: int = 1) -> list[Tensor]:
    """Return `count` different tensors, of both signs, whose reduction by `op` is `value`.

    Sums and averages add multiples of `unit`, so that integers stay integers. Products multiply by powers of two, or by
    signs alone if the dtype has no fractions. Some operands give a wrong result unless they are reduced first: sums of
    integers wrap around, a NaN is the sum of two infinities, and one rank alone holds a NaN or infinite extreme.

    >>> one, two = operands(torch.tensor([5.0]), 2, "sum", torch.Generator().manual_seed(0))
    >>> one + two
    tensor([5.])
    """
    dtype = value.dtype
    if op == "avg" and not (dtype.is_floating_point or dtype.is_complex):
        raise PlacementError(f"no operands of an average in {dtype}", "use a floating-point dtype")
    if op in ("max", "min") and dtype.is_complex:
        raise PlacementError(f"no operands of a {op} in {dtype}", "use a real dtype: complex numbers have no order")
    if dtype is torch.bool:
        return _bool_operands(value, count, op, generator)
    wide = value.to(wide_dtype(dtype))
    if op in ("max", "min"):
        return [part.to(dtype) for part in _extreme_operands(wide, dtype, count, op, generator)]
    if op == "product":
        factors = [_pick(wide, _FACTORS[_kind(dtype)], generator) for _ in range(count - 1)]
        rest = wide
        for factor in factors:  # their inverses are exact
            rest = rest / factor if dtype.is_floating_point else rest * factor.conj()
        return [part.to(dtype) for part in (*factors, rest)]
    noise = [unit * _integers(wide, -4, 5, generator) for _ in range(count - 1)]
    if not (dtype.is_floating_point or dtype.is_complex):
        noise = [_wrapping(part, dtype, generator) for part in noise]
    elif noise and dtype.is_floating_point:
        opposite = wide.isnan() & (_integers(wide, 0, 2, generator) > 0)
        noise[0] = noise[0].masked_fill(opposite, torch.inf)
        wide = wide.masked_fill(opposite, -torch.inf)
    if op == "avg":
        return [(wide + part).to(dtype) for part in (*noise, -sum(noise))]
    return [part.to(dtype) for part in (*noise, wide - sum(noise))]


def _wrapping(noise: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return the integers with a third of them replaced by ones so large that their sum wraps around."""
    top = min(torch.iinfo(dtype).max, torch.iinfo(torch.int64).max)
    large = torch.randint(top // 2, top, noise.shape, generator=generator).to(noise)
    return torch.where(torch.randint(3, noise.shape, generator=generator).to(noise) > 0, noise, large)


_FACTORS: dict[str, list[complex]] = {
    "unsigned": [1],
    "signed": [1, -1],
    "float": [-2, -1, -0.5, 0.5, 1, 2],
    "complex": [1, -1, 1j, -1j],
}


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return "complex"
    if dtype.is_floating_point:
        return "float"
    return "signed" if dtype.is_signed else "unsigned"


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the widest dtype of the same kind."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else torch.int64


def _integers(like: Tensor, low: int, high: int, generator: torch.Generator) -> Tensor:
    drawn = torch.randint(low, high, like.shape, generator=generator).to(like)
    if like.is_complex():
        drawn = torch.complex(drawn.real, torch.randint(low, high, like.shape, generator=generator).to(drawn.real))
    return drawn


def _pick(like: Tensor, choices: Sequence[complex], generator: torch.Generator) -> Tensor:
    index = torch.randint(len(choices), like.shape, generator=generator).to(like.device)
    return torch.tensor(choices, dtype=like.dtype, device=like.device)[index]


def _extreme_operands(
    wide: Tensor, dtype: torch.dtype, count: int, op: str, generator: torch.Generator
) -> list[Tensor]:
    """Return operands of which, for each element, one random rank holds the extreme; others differ by up to 12.

    Some integers are as far from it as the dtype allows. The operands of an infinite extreme or NaN are finite, but
    those of a maximum of -inf are all -inf.
    """
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    holder = torch.randint(count, wide.shape, generator=generator).to(wide.device)
    parts = []
    for index in range(count):
        behind = _integers(wide, 0, 13, generator)
        if not dtype.is_floating_point:  # close to the limits of the dtype there is no room
            behind = torch.where((wide > limits.max - 13) | (wide < limits.min + 13), 0, behind)
        near = wide.where(wide.isfinite(), _integers(wide, -12, 25, generator))
        part = (near - behind if op == "max" else near + behind).clamp(limits.min, limits.max)
        if not dtype.is_floating_point and dtype is not torch.uint64:
            part = part.masked_fill(_integers(wide, 0, 4, generator) == 0, limits.min if op == "max" else limits.max)
        parts.append(torch.where((holder == index) | (wide == (-torch.inf if op == "max" else torch.inf)), wide, part))
    return parts


def _bool_operands(value: Tensor, count: int, op: str, generator: torch.Generator) -> list[Tensor]:
    holder = torch.randint(count, value.shape, generator=generator).to(value.device)
    parts = []
    for index in range(count):
        coin = torch.randint(2, value.shape, generator=generator).to(value.device).bool()
        part = value & coin if op in ("sum", "max") else value | coin
        parts.append(torch.where(holder == index, value, part))
    return parts
