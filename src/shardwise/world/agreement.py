"""Whether the ranks of a simulated world hold the same values, as they must where a tensor becomes a Python value.

>>> agreed([2.5, 2.5], "aten.item")
2.5
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from ..errors import WorldError

__all__ = ["agreed", "same"]

T = TypeVar("T")


def agreed(values: Sequence[T], what: str) -> T:
    """Return the value that all ranks have in common, or raise an error that lists each rank's value."""
    first = values[0]
    if all(value == first or (value != value and first != first) for value in values):
        return first
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(repr(value), []).append(rank)
    listed = "; ".join(f"{value} on {_ranks_text(holders)}" for value, holders in ranks.items())
    raise WorldError(
        f"{what} returns one Python value, but the ranks differ: {listed}",
        "read one rank's value from `x.shards[rank]`, or communicate first so that all ranks hold the same",
    )


def _ranks_text(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def same(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether all tensors hold the same values; NaN equals NaN."""
    first = tensors[0]
    return all(t is first or _equal(t, first) for t in tensors[1:])


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape:
        return False
    if torch.equal(a, b):
        return True
    return bool(((a == b) | ((a != a) & (b != b))).all())
