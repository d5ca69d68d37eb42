"""From a counter to 64 random bits, in integer ops that every device has and that can be traced.

The mixing is SplitMix64's (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014), with the second
half of the key between its rounds, so that the sequences of two keys do not overlap where their counters meet.
Philox 4x32-10 would take twice the work per number: with these ops its 32-bit products are 64-bit products.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
MIX_1, MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_ALL = (1 << 64) - 1


class Key(NamedTuple):
    """128 bits that are drawn once per call: ints, or 0-dim tensors where a program is traced.

    Both halves must be random. The second half passes one round of mixing only, so second halves that differ in a few
    bits would give similar numbers.
    """

    first: int | Tensor
    second: int | Tensor

    def again(self) -> Key:
        """Return another key, for a second number at the same index."""
        return Key(self.first ^ signed(MIX_1), self.second)


def mix(counters: Tensor, key: Key) -> Tensor:
    """Replace each counter by its 64 random bits, in place."""
    state, shifted = counters, torch.empty_like(counters)

    def fold(by: int) -> Tensor:
        """Xor the state with itself, shifted to the right with zeros coming in."""
        torch.bitwise_right_shift(state, by, out=shifted)
        return state.bitwise_xor_(shifted.bitwise_and_((1 << (64 - by)) - 1))

    state.mul_(signed(GOLDEN)).add_(key.first)
    fold(30).mul_(signed(MIX_1)).bitwise_xor_(key.second)
    fold(27).mul_(signed(MIX_2))
    return fold(31)


def mixed(*numbers: int) -> int:
    """Return 64 bits mixed from a few numbers, on the host."""
    state = 0
    for number in numbers:
        state = (state + number * GOLDEN + GOLDEN) & _ALL
        state = ((state ^ (state >> 30)) * MIX_1) & _ALL
        state = ((state ^ (state >> 27)) * MIX_2) & _ALL
        state ^= state >> 31
    return signed(state)


def threshold(p: float) -> int:
    """Return the signed 32-bit word below which a share p < 1 of all words lies."""
    return math.floor(p * 2.0**32) - 2**31


def signed(value: int) -> int:
    """Return the signed 64-bit integer with the same bits."""
    value &= _ALL
    return value - (1 << 64) if value >= 1 << 63 else value
