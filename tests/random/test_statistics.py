"""A million numbers by index: distributed as they should be, and no more alike than chance has it.

Seeds are fixed: a test that passes once passes always. Chance breaks the limits once in 10^4 cases, or less.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.random.bits import Key, mix, mixed
from shardwise.random.box import Box
from shardwise.random.draw import draw_key
from shardwise.random.fill import fill

N = 1_000_000
KEY = Key(0x1234_5678_9ABC_DEF0, 0x0FED_CBA9_8765_4321)


def drawn(name: str, *arguments: Any, dtype: torch.dtype = torch.float32, key: Key = KEY, offset: int = 0) -> Tensor:
    return fill(torch.empty(N, dtype=dtype), Box(offset, (N,), (1,)), key, name, arguments)


DISTRIBUTIONS: dict[str, tuple[tuple[Any, ...], Any]] = {
    "uniform_": ((0.0, 1.0), lambda x: x),
    "normal_": ((0.0, 1.0), torch.special.ndtr),
    "exponential_": ((2.0,), lambda x: -torch.expm1(-2 * x)),
    "cauchy_": ((0.0, 1.0), lambda x: 0.5 + x.atan() / math.pi),
    "log_normal_": ((0.0, 1.0), lambda x: torch.special.ndtr(x.log())),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_kolmogorov_smirnov(name: str, dtype: torch.dtype) -> None:
    arguments, cdf = DISTRIBUTIONS[name]
    x = cdf(drawn(name, *arguments, dtype=dtype).double()).sort().values
    ideal = torch.arange(N, dtype=torch.float64) / N
    distance = torch.maximum((x - ideal).abs().max(), (x - ideal - 1 / N).abs().max())
    assert distance * math.sqrt(N) < 2.23  # once in 10^4


def chi_square(counts: Tensor) -> float:
    """In deviations from what chance leads to expect, for equally likely cells."""
    expected = counts.sum() / counts.numel()
    freedom = counts.numel() - 1
    return ((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)).item()


@pytest.mark.parametrize("shift", [0, 8, 16, 24, 32, 40, 48, 56])
def test_chi_square_of_every_byte_and_of_pairs(shift: int) -> None:
    """The bits themselves, low ones too: byte by byte, and each byte with that of the next counter."""
    byte = (mix(torch.arange(N), KEY) >> shift) & 255
    assert abs(chi_square(byte.bincount(minlength=256).double())) < 4
    pairs = byte[:-1] * 256 + byte[1:]
    assert abs(chi_square(pairs.bincount(minlength=65536).double())) < 4


def test_integers_and_coins() -> None:
    for high in (7, 1000, 1 << 20):
        values = drawn("random_", 0, high, dtype=torch.int64)
        assert (values.min() >= 0) & (values.max() < high)
        assert abs(chi_square((values * min(high, 1000) // high).bincount().double())) < 4
    for p in (0.001, 0.3, 0.5):
        heads = drawn("bernoulli_", p).sum().item()
        assert abs(heads - N * p) < 4 * math.sqrt(N * p * (1 - p))
    trials = drawn("geometric_", 0.3)
    assert abs(trials.mean() - 1 / 0.3) < 4 * math.sqrt(0.7) / 0.3 / math.sqrt(N)


@pytest.mark.parametrize(
    ("low", "high"),
    [(-(1 << 63), 1 << 62), (-(1 << 62), (1 << 63) - 1), (-(1 << 62), 1 << 62), (-2, (1 << 63) - 1), (-(1 << 63), 0)],
)
def test_integers_of_a_very_wide_range(low: int, high: int) -> None:
    """64 random bits modulo the width of the range, as in PyTorch."""
    values = drawn("random_", low, high, dtype=torch.int64)
    assert (values.min() >= low) & (values.max() < high)
    if high - low >= 1 << 63:
        words = drawn("random_", -(1 << 63), None, dtype=torch.int64)[:1000].tolist()
        assert values[:1000].tolist() == [low + word % (1 << 64) % (high - low) for word in words]


@pytest.mark.parametrize(
    ("dtype", "low", "high", "first", "last"),
    [
        (torch.bfloat16, 0, 300, 0, 298),
        (torch.bfloat16, 257, 303, 258, 302),
        (torch.bfloat16, -303, -257, -302, -258),
        (torch.float16, 0, 4096, 0, 4094),
        (torch.float32, (1 << 24) - 4, (1 << 24) + 4, (1 << 24) - 4, (1 << 24) + 2),
    ],
)
def test_integers_are_not_rounded_out_of_range(dtype: torch.dtype, low: int, high: int, first: int, last: int) -> None:
    values = drawn("random_", low, high, dtype=dtype)
    assert (values.min().item(), values.max().item()) == (first, last)


def test_moments_and_tails_of_normals() -> None:
    x = drawn("normal_", 0.0, 1.0).double()
    for power, moment, spread in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((x**power).mean() - moment) < 4 * math.sqrt(spread / N)
    assert 4.4 < x.max() < 6.7
    assert -6.7 < x.min() < -4.4


def correlation(a: Tensor, b: Tensor) -> float:
    return (((a - a.mean()) * (b - b.mean())).mean() / a.std() / b.std() * math.sqrt(a.numel())).item()


@pytest.mark.parametrize("name", ["uniform_", "normal_"])
def test_no_correlation_of_indices_calls_and_seeds(name: str) -> None:
    x = drawn(name, 0.0, 1.0).double()
    for lag in (1, 2, 3, 64, 1 << 16):
        assert abs(correlation(x[:-lag], x[lag:])) < 4, lag
        assert abs(correlation(x[:-lag] ** 2, x[lag:] ** 2)) < 4, lag
    generators = [torch.Generator().manual_seed(seed) for seed in (0, 1, 2)]
    first, *keys = [draw_key(generator, generator.device) for generator in [*generators, generators[0]]]
    keys.append(Key(mixed(0, 0, 0), mixed(0, 0, 1)))  # as from a GPU's generator, and its next call
    keys.append(Key(mixed(0, 4, 0), mixed(0, 4, 1)))
    x = drawn(name, 0.0, 1.0, key=first).double()
    for key in keys:
        y = drawn(name, 0.0, 1.0, key=key).double()
        assert abs(correlation(x, y)) < 4, key
        assert abs(correlation(x[1:], y[:-1])) < 4, key


def test_each_bit_of_counter_and_start_changes_half_the_bits() -> None:
    counters = torch.arange(20_000) * 7919
    base = mix(counters.clone(), KEY)
    changed = [mix(counters ^ (1 << bit), KEY) for bit in range(40)]
    changed += [mix(counters.clone(), Key(KEY.first ^ (1 << bit), KEY.second)) for bit in range(62)]
    for other in changed:
        flipped = base ^ other
        shares = torch.stack([((flipped >> bit) & 1).double().mean() for bit in range(64)])
        assert (shares - 0.5).abs().max() < 5.5 * 0.5 / math.sqrt(20_000)


def test_birthday_spacings() -> None:
    """4096 birthdays in a year of 2^32 days: spacings that occur again number 4096^3 / 2^34 = 4 on average."""
    total = 0
    for call in range(64):
        days = (mix(torch.arange(4096) + call * 4096, KEY) & 0xFFFFFFFF).sort().values
        spacings = days.diff().sort().values
        total += int((spacings.diff() == 0).sum())
    assert abs(total - 256) < 4 * 16
