"""Which tokens of a sharded sequence see each other, as arithmetic on runs of positions.

A rank's tokens are segments: runs whose positions follow each other, inside one document. Two segments of a sequence
are the same run or have no token in common, so a query segment sees all of a key segment, nothing of it, or, in causal
attention, the lower triangle of itself. No mask is needed.

>>> segments_of(10, [(0, 5), (5, 10)], documents=(0, 7, 10))[1]
(Segment(row=0, start=5, stop=7, document=0), Segment(row=2, start=7, stop=10, document=1))
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from ..sharding.cache import cached_within
from ..sharding.layout import Factor, Run, factor_range


class Segment(NamedTuple):
    """Local rows from `row` on that hold the positions from `start` to `stop` of one document."""

    row: int
    start: int
    stop: int
    document: int

    @property
    def rows(self) -> slice:
        """The local rows."""
        return slice(self.row, self.row + self.stop - self.start)


class Pair(NamedTuple):
    """A segment of queries and one of keys that they see; `causal` if each query sees only keys up to its position."""

    query: Segment
    key: Segment
    causal: bool


def zigzag_runs(length: int, ranks: int) -> list[Run]:
    """Return the runs of a sequence in head-tail order: each rank has a chunk of the head and one of the tail.

    Chunks mirror each other, so that all ranks have the same work in causal attention. Any length will do.

    >>> zigzag_runs(8, 2)
    [(0, 2), (6, 8), (2, 4), (4, 6)]
    """
    runs, head, tail = [], 0, length
    for rank in range(ranks):
        start, stop = factor_range((ranks,), Factor(length, (0,)), (rank,))
        first = (stop - start + 1) // 2
        last = stop - start - first
        runs += [(head, head + first), (tail - last, tail)]
        head, tail = head + first, tail - last
    return runs


def zigzag_order(length: int, ranks: int) -> list[int]:
    """Return the original position of each token of a sequence in head-tail order."""
    return [position for run in zigzag_runs(length, ranks) for position in range(*run)]


@cached_within(16 << 20, lambda ranks: 200 * sum(map(len, ranks)))
def segments_of(
    length: int, bounds: tuple[Run, ...], documents: tuple[int, ...] = (), zigzag: int = 0
) -> tuple[tuple[Segment, ...], ...]:
    """Return the segments of each rank, if rank i holds the rows `bounds[i]` of the sequence.

    `documents` are the positions at which documents begin, and the end of the last one; empty for one document.
    `zigzag` is the number of ranks that a sequence in head-tail order was arranged for; 0 for the original order.
    """
    edges = documents or (0, length)
    runs = zigzag_runs(length, zigzag) if zigzag else [(0, length)]
    places = list(itertools.accumulate((stop - start for start, stop in runs), initial=0))
    found = []
    for first, last in bounds:
        mine: list[Segment] = []
        for place, (start, stop) in zip(places, runs, strict=False):
            low, high = max(first, place), min(last, place + stop - start)
            if low < high:
                mine += _in_documents(low - first, start + low - place, start + high - place, edges)
        found.append(tuple(mine))
    return tuple(found)


def _in_documents(row: int, start: int, stop: int, edges: Sequence[int]) -> list[Segment]:
    """Return a run of positions, split where documents end."""
    found, position = [], start
    while position < stop:
        document = bisect_right(edges, position) - 1
        end = min(stop, edges[document + 1])
        found.append(Segment(row + position - start, position, end, document))
        position = end
    return found


def pairs_of(queries: Sequence[Segment], keys: Sequence[Segment], causal: bool) -> list[Pair]:
    """Return the pairs of segments whose queries see some of the keys."""
    return [
        Pair(query, key, causal and query.start == key.start)
        for query in queries
        for key in keys
        if query.document == key.document and (not causal or key.start <= query.start)
    ]
