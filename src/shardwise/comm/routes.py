"""Routes: which ranks send which elements to which, when a tensor changes its mesh.

Each rank receives exactly what it needs and does not hold. Ranks that hold the same shard divide the sending of it
evenly, to the element. Pure arithmetic on layouts and ranks.

>>> have = Holding.of(source_layout, [(0, (0,)), (1, (1,))])           # rank 0 is at coordinate (0,) of the source mesh
>>> need = Holding.of(target_layout, [(2, (0,)), (3, (1,))])
>>> route = Route([(have, need)])
>>> route.sends(0)                                                     # boxes by receiver
{2: (((0, 0, 4), (0, 0, 8)),)}
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from operator import itemgetter
from typing import NamedTuple

from ..sharding.layout import Coordinate, Layout, Run
from .boxes import Box, Segment, common_runs, cut_boxes

Runs = tuple[tuple[Run, ...], ...]
"""The elements that a rank holds: for each dim, its runs of indices."""
Messages = dict[int, tuple[Box, ...]]
"""Boxes by the rank to which they are sent, or from which they are received."""


class Holding(NamedTuple):
    """Which ranks hold, or need, which elements: the distinct shards, and the ranks of each in ascending order."""

    shards: tuple[Runs, ...]
    ranks: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, layout: Layout, places: Iterable[tuple[int, Coordinate]]) -> Holding:
        """Return the holding of the ranks in `places`, each given with its coordinate. Empty shards are left out."""
        found: dict[Runs, list[int]] = {}
        for rank, at in places:
            runs = layout.runs(at)
            if all(runs):
                found.setdefault(runs, []).append(rank)
        return cls(tuple(found), tuple(tuple(sorted(ranks)) for ranks in found.values()))


class Share(NamedTuple):
    """The elements `[low, high)` of an overlap, which one rank sends to another."""

    sender: int
    receiver: int
    overlap: Overlap
    low: int
    high: int

    @property
    def boxes(self) -> tuple[Box, ...]:
        """The boxes of these elements: all that this sender sends to this receiver, which needs only one shard."""
        return self.overlap.cut(self.low, self.high)


class Overlap:
    """The elements that a shard of the source and a shard of the target (given by index) have in common."""

    def __init__(self, source: int, target: int, by_dim: Sequence[Sequence[tuple[int, int, int]]]) -> None:
        self.source, self.target, self._by_dim = source, target, by_dim
        self.volume = math.prod(sum(length for _, _, length in runs) for runs in by_dim)

    @property
    def count(self) -> int:
        """The number of boxes."""
        return math.prod(map(len, self._by_dim))

    @cached_property
    def boxes(self) -> tuple[Box, ...]:
        """The boxes of these elements."""
        return tuple(itertools.product(*self._by_dim))

    def cut(self, low: int, high: int) -> tuple[Box, ...]:
        """Return the boxes of the elements `[low, high)`."""
        return self.boxes if (low, high) == (0, self.volume) else tuple(cut_boxes(self.boxes, low, high))


class Part:
    """The messages from the ranks of one holding to those of another."""

    def __init__(self, have: Holding, need: Holding, segment: Segment | None = None) -> None:
        self.have, self.need = have, need
        self.source_of = {rank: shard for shard, ranks in enumerate(have.ranks) for rank in ranks}
        self.target_of = {rank: shard for shard, ranks in enumerate(need.ranks) for rank in ranks}
        self.from_source: list[list[Overlap]] = [[] for _ in have.shards]
        self.from_target: list[list[Overlap]] = [[] for _ in need.shards]
        for overlap in _overlaps(have.shards, need.shards, segment):
            self.from_source[overlap.source].append(overlap)
            self.from_target[overlap.target].append(overlap)
        self._shares: dict[int, list[Share]] = {}

    def shares(self, source: int) -> list[Share]:
        """Return how the sending of one shard of the source is divided among its holders.

        The elements that others need are taken receiver by receiver in rank order, so that a receiver has few senders,
        and ranks with neighbouring numbers talk to each other.
        """
        found = self._shares.get(source)
        if found is None:
            holders = set(self.have.ranks[source])
            needed = [
                (rank, overlap)
                for overlap in self.from_source[source]
                for rank in self.need.ranks[overlap.target]
                if rank not in holders
            ]
            needed.sort(key=itemgetter(0))
            found = self._shares[source] = _divided(needed, self.have.ranks[source])
        return found

    def demand(self, source: int) -> int:
        """Return how many elements the holders of a shard of the source send to others."""
        holders = set(self.have.ranks[source])
        return sum(
            overlap.volume * (len(ranks) - len(holders.intersection(ranks)))
            for overlap in self.from_source[source]
            for ranks in [self.need.ranks[overlap.target]]
        )

    def own(self, rank: int) -> tuple[Box, ...]:
        """Return the boxes that a rank needs and already holds."""
        source, target = self.source_of.get(rank), self.target_of.get(rank)
        if source is None or target is None:
            return ()
        return next((overlap.boxes for overlap in self.from_source[source] if overlap.target == target), ())


def _divided(needed: list[tuple[int, Overlap]], holders: tuple[int, ...]) -> list[Share]:
    total = sum(overlap.volume for _, overlap in needed)
    ends = [total * (index + 1) // len(holders) for index in range(len(holders))]
    shares, start, holder = [], 0, 0
    for receiver, overlap in needed:
        stop, low = start + overlap.volume, start
        while low < stop:
            while ends[holder] <= low:
                holder += 1
            high = min(stop, ends[holder])
            shares.append(Share(holders[holder], receiver, overlap, low - start, high - start))
            low = high
        start = stop
    return shares


def _overlaps(source: Sequence[Runs], target: Sequence[Runs], segment: Segment | None) -> Iterable[Overlap]:
    """Yield the overlaps of all pairs of shards. The intersection of two runs of a dim is computed once."""
    if not source or not target:
        return
    dims = len(source[0])
    common: list[dict[tuple[Run, ...], list[tuple[tuple[Run, ...], Sequence[tuple[int, int, int]]]]]] = []
    for dim in range(dims):
        needed = dict.fromkeys(runs[dim] for runs in target)
        common.append({})
        for have in dict.fromkeys(runs[dim] for runs in source):
            pairs = ((need, common_runs(dim, have, need, segment)) for need in needed)
            common[dim][have] = [(need, runs) for need, runs in pairs if runs]
    index = {runs: number for number, runs in enumerate(target)}
    for number, runs in enumerate(source):
        for found in itertools.product(*(common[dim][runs[dim]] for dim in range(dims))):
            other = index.get(tuple(need for need, _ in found))
            if other is not None:
                yield Overlap(number, other, [by_dim for _, by_dim in found])


class Route:
    """The elements that ranks send each other. Several parts are several tensors, on separate sets of ranks."""

    def __init__(self, parts: Iterable[tuple[Holding, Holding]], segment: Segment | None = None) -> None:
        self.parts = [Part(have, need, segment) for have, need in parts]
        self._part_of = {rank: part for part in self.parts for rank in (*part.source_of, *part.target_of)}
        self._sends: dict[int, Messages] = {}
        self._receives: dict[int, Messages] = {}

    @property
    def nbytes(self) -> int:
        """About how many bytes this route takes in memory, with the boxes of all ranks."""
        overlaps = [overlap for part in self.parts for each in part.from_source for overlap in each]
        return 1024 + 256 * len(self._part_of) + sum(512 + 160 * overlap.count for overlap in overlaps)

    @cached_property
    def sent(self) -> dict[int, int]:
        """The number of elements that each rank sends to others. Ranks that send none are left out."""
        totals: dict[int, int] = {}
        for part in self.parts:
            for shard, holders in enumerate(part.have.ranks):
                total = part.demand(shard)
                for index, rank in enumerate(holders):
                    share = total * (index + 1) // len(holders) - total * index // len(holders)
                    if share:
                        totals[rank] = share
        return totals

    @cached_property
    def received(self) -> dict[int, int]:
        """The number of elements that each rank receives from others. Ranks that receive none are left out."""
        totals: dict[int, int] = {}
        for part in self.parts:
            for shard, ranks in enumerate(part.need.ranks):
                needed = sum(overlap.volume for overlap in part.from_target[shard])
                for rank in ranks:
                    held = part.source_of.get(rank)
                    own = (overlap.volume for overlap in part.from_target[shard] if overlap.source == held)
                    lacking = needed - sum(own)
                    if lacking:
                        totals[rank] = lacking
        return totals

    @cached_property
    def staged(self) -> dict[int, int]:
        """The number of elements that each rank sends and receives. Ranks that do neither are left out."""
        totals = dict(self.sent)
        for rank, count in self.received.items():
            totals[rank] = totals.get(rank, 0) + count
        return totals

    def sends(self, rank: int) -> Messages:
        """Return the boxes that a rank sends, by receiver."""
        found = self._sends.get(rank)
        if found is None:
            part = self._part_of.get(rank)
            source = None if part is None else part.source_of.get(rank)
            shares = [] if part is None or source is None else part.shares(source)
            mine = [share for share in shares if share.sender == rank]
            found = self._sends[rank] = {share.receiver: share.boxes for share in mine}
        return found

    def receives(self, rank: int) -> Messages:
        """Return the boxes that a rank receives, by sender."""
        found = self._receives.get(rank)
        if found is None:
            part = self._part_of.get(rank)
            target = None if part is None else part.target_of.get(rank)
            overlaps = [] if part is None or target is None else part.from_target[target]
            shares = [share for overlap in overlaps if part for share in part.shares(overlap.source)]
            found = self._receives[rank] = {share.sender: share.boxes for share in shares if share.receiver == rank}
        return found

    def own(self, rank: int) -> tuple[Box, ...]:
        """Return the boxes that a rank needs and already holds."""
        part = self._part_of.get(rank)
        return () if part is None else part.own(rank)
