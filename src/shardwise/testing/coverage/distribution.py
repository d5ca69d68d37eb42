"""Whether random results come from the same distribution: the largest distance of two cumulative frequencies."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from .trial import Answer

FEWEST = 50  # numbers from which on frequencies are compared
FAR = 2.5  # by chance one pair of samples in some 100,000 is farther apart than this, times the usual distance


@contextmanager
def other_seeds(number: int) -> Iterator[None]:
    """Inside, seeds are others: functions of the database set the same one before each call."""
    seed = torch.manual_seed
    with mock.patch("torch.manual_seed", lambda value: seed(value + number)):
        yield


def same_distribution(plain: Sequence[Answer], distributed: Sequence[Answer], whole: Callable[[Any], Tensor]) -> bool:
    """Whether the results of plain and of distributed calls are drawn alike, as far as so few numbers can tell."""
    for results in range(len(plain[0].results)):
        one = [answer.results[results] for answer in plain]
        other = [answer.results[results] for answer in distributed]
        if not isinstance(one[0], Tensor):
            continue
        pooled = _pooled(one), _pooled([whole(value) for value in other])
        if min(map(len, pooled)) >= FEWEST and distance(*pooled) > FAR:
            return False
    return True


def _pooled(tensors: Sequence[Tensor]) -> Tensor:
    values = torch.cat([tensor.detach().flatten() for tensor in tensors])
    values = torch.view_as_real(values).flatten() if values.is_complex() else values
    return values.double()[values.double().isfinite()]


def distance(one: Tensor, other: Tensor) -> float:
    """The largest difference of cumulative frequencies, in units of its usual size for so many numbers."""
    at = torch.cat([one, other]).unique()
    below = [torch.searchsorted(values.sort().values, at, right=True) / len(values) for values in (one, other)]
    largest = float((below[0] - below[1]).abs().max()) if len(at) else 0.0
    return largest * math.sqrt(len(one) * len(other) / (len(one) + len(other)))
