"""Test whether random results have the same distribution, by the largest distance of cumulative frequencies."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from ..checker import Answer

FEWEST = 50  # numbers from which on frequencies are compared
POOLS, FARTHER = 8, 1.5  # of plain calls, and how much farther apart the distributed ones may be
FAR = 2.5  # by chance one pair of samples in some 100,000 is farther apart than this, times the usual distance


@contextmanager
def other_seeds(number: int) -> Iterator[None]:
    """Shift all seeds that `torch.manual_seed` sets inside: entries of the database set the same one every time."""
    seed = torch.manual_seed
    with mock.patch("torch.manual_seed", lambda value: seed(value + number)):
        yield


def same_distribution(
    plain: Sequence[Answer],
    distributed: Sequence[Answer],
    full: Callable[[object], Tensor],
    again: Callable[[int], Answer],
) -> bool:
    """Return whether plain and distributed calls draw from the same distribution, as far as these numbers show.

    Numbers of one call may be correlated, for example if entire channels are dropped. So a large distance is compared
    with the distances between plain calls, which `again` makes.
    """
    for index, first in enumerate(plain[0].results):
        if not isinstance(first, Tensor):
            continue
        one = _pooled([answer.results[index] for answer in plain])
        other = _pooled([full(answer.results[index]) for answer in distributed])
        if min(len(one), len(other)) < FEWEST or distance(one, other) <= FAR:
            continue
        count = len(plain)
        pools = [_pooled([again(count * i + j).results[index] for j in range(count)]) for i in range(POOLS)]
        usual = max(distance(*pair) for pair in itertools.combinations(pools, 2))
        if distance(one, other) > FARTHER * usual:
            return False
    return True


def _pooled(results: Sequence[object]) -> Tensor:
    values = torch.cat([result.detach().flatten() for result in results if isinstance(result, Tensor)])
    values = torch.view_as_real(values).flatten() if values.is_complex() else values
    return values.double()[values.double().isfinite()]


def distance(one: Tensor, other: Tensor) -> float:
    """Return the largest difference of cumulative frequencies, in units of its usual size for this many numbers."""
    at = torch.cat([one, other]).unique()
    below = [torch.searchsorted(values.sort().values, at, right=True) / len(values) for values in (one, other)]
    largest = float((below[0] - below[1]).abs().max()) if len(at) else 0.0
    return largest * math.sqrt(len(one) * len(other) / (len(one) + len(other)))
