"""Random numbers that do not know about sharding: each is a function of a key and its global index.

The key is drawn from the user's generator, so `torch.manual_seed` governs the numbers and every call advances the
generator by the same amount on all ranks, whatever they hold.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .layout import Coordinate, Layout
from .spec import contiguous_stride

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def draw_key(generator: torch.Generator | None = None) -> int:
    """A key from this generator, or from the default one."""
    device = "cpu" if generator is None else generator.device
    return int(torch.randint(2**63 - 1, (), generator=generator, device=device).item())


def uniform(layout: Layout, at: Coordinate, key: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers in [0, 1) for the elements that the rank at this coordinate holds, exact in their dtype."""
    bits = _BITS.get(dtype, 24)
    return _fraction(_hash(_indices(layout, at, device), key), bits, torch.float64 if bits > 24 else torch.float32).to(
        dtype
    )


def normal(layout: Layout, at: Coordinate, key: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Standard normal numbers for the elements that the rank at this coordinate holds, by Box and Muller."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    bits = 53 if wide is torch.float64 else 24
    indices = _indices(layout, at, device)
    radius = (_fraction(_hash(indices, key), bits, wide) - 1.0).neg_().log_().mul_(-2.0).sqrt_()
    angle = _fraction(_hash(indices, key ^ _MIX_1), bits, wide).mul_(2.0 * math.pi)
    return radius.mul_(angle.cos_()).to(dtype)


def integers(layout: Layout, at: Coordinate, key: int, low: int, high: int, device: torch.device) -> Tensor:
    """Whole numbers in [low, high) for the elements that the rank at this coordinate holds."""
    span = min(high - low, 2**63 - 1)
    return _shift(_hash(_indices(layout, at, device), key), 1).remainder_(span).add_(low)


def _indices(layout: Layout, at: Coordinate, device: torch.device) -> Tensor:
    """The flat global index of every element held."""
    shape = layout.local_shape(at)
    flat = torch.zeros(shape, dtype=torch.int64, device=device)
    for dim, (runs, step) in enumerate(zip(layout.runs(at), contiguous_stride(layout.shape), strict=True)):
        if not runs:
            return flat
        places = torch.cat([torch.arange(start, stop, device=device) for start, stop in runs])
        flat += (places * step).view([-1 if d == dim else 1 for d in range(len(shape))])
    return flat


def _hash(index: Tensor, key: int) -> Tensor:
    """SplitMix64 of the index-th number of the sequence that starts at the key."""
    state = (index * _signed(_GOLDEN)).add_(_signed(key))
    state = (state ^ _shift(state, 30)).mul_(_signed(_MIX_1))
    state = (state ^ _shift(state, 27)).mul_(_signed(_MIX_2))
    return state ^ _shift(state, 31)


def _shift(value: Tensor, by: int) -> Tensor:
    """A shift to the right that fills with zeros."""
    return (value >> by).bitwise_and_((1 << (64 - by)) - 1)


def _fraction(bits: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """The highest bits as a number in [0, 1)."""
    return _shift(bits, 64 - count).to(dtype).mul_(2.0**-count)


def _signed(value: int) -> int:
    """The 64-bit integer with the same bits."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value
