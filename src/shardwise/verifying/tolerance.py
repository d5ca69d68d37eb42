"""How far two correct runs of a program may differ.

Rounding is measured: the program runs on one device again, from parameters that were moved by a few roundings, and
each tensor may differ from the reference by a multiple of what it moved. So whatever amplifies rounding (depth, a
normalisation, Adam's division by a tiny gradient) widens the tolerance of the tensors behind it, and of no others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .ranks import Close
from .recording import Key, Recording

_ROUNDINGS = 4
"""The noise on parameters, in rounding errors."""


class Tolerances:
    """The largest difference that rounding explains, for each tensor of a run."""

    def __init__(self, reference: Recording, moved: Sequence[Recording], eps: float) -> None:
        self._reference, self._moved = reference, moved
        # Low precision leaves less room between rounding and bugs.
        self._slack = 32.0 if eps < 1e-4 else 8.0
        self._eps = eps
        self._scales = _scales(reference)

    def of(self, key: Key) -> float:
        """Return the tolerance of one tensor."""
        value = self._reference.seen[key].value
        if not value.is_floating_point():
            return 0.0
        apart = [_apart(value, run.seen[key].value) for run in self._moved if key in run.seen]
        # A gradient may be zero but for rounding: then it is rounding at the scale of its neighbours.
        floor = 16 * self._eps * max(self._scales[key.step, key.kind], largest(value))
        return self._slack * max(apart, default=0.0) + floor


def _scales(reference: Recording) -> Mapping[tuple[int, str], float]:
    found: dict[tuple[int, str], float] = {}
    for key, seen in reference.seen.items():
        at = key.step, key.kind
        found[at] = max(found.get(at, 0.0), largest(seen.value) if seen.value.is_floating_point() else 0.0)
    return found


def largest(value: Tensor) -> float:
    """Return the largest absolute value that is finite, or 0."""
    value = value.detach().abs().double()
    value = value[value.isfinite()]
    return float(value.max()) if value.numel() else 0.0


def _apart(one: Tensor, other: Tensor) -> float:
    return largest(one.double() - other.double()) if one.shape == other.shape else 0.0


def closeness(tolerance: float) -> Close:
    """Return a function that compares two tensors to within a tolerance; equal infinities and NaNs are close."""

    def close(one: Tensor, other: Tensor) -> bool:
        if one.shape != other.shape:
            return False
        if not tolerance and not one.is_floating_point() and not other.is_floating_point():
            return torch.equal(one, other)
        one, other = one.double(), other.double()
        same = (one == other) | (one.isnan() & other.isnan())
        return bool((same | ((one - other).abs() <= tolerance)).all())

    return close


def move(parameters: Sequence[Tensor], eps: float, seed: int) -> None:
    """Multiply parameters by noise of a few rounding errors, in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters:
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.mul_(1 + _ROUNDINGS * eps * noise.to(parameter.device))
