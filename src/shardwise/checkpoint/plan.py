"""Plans: the pieces that each rank writes, and their places in its file. The last plan is cached.

A plan depends on names, dtypes, shapes and placements, not on values. If these are unchanged on all ranks, planning a
save takes an all-reduce of one number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..sharding.base import DTensorBase
from ..sharding.runtime import WorldState, runtime_of_world
from .archive import ALIGNMENT, archive_of
from .held import Held, boxes_of, chunks_of, chunks_of_other, is_other, shape_of
from .ranks import Ranks, agreed, through_coordinator
from .spread import Piece, check_complete, merged, spread
from .state import FlatState, Path


class Entry(NamedTuple):
    """A piece and its place in a rank's file: start and length of its archive, and the start of its elements."""

    piece: Piece
    start: int
    length: int
    data: int


class RankPlan(NamedTuple):
    """What one rank writes: pieces of tensors, and objects by name."""

    rank: int
    entries: list[Entry]
    objects: list[str]

    @property
    def file(self) -> str:
        """The name of this rank's file."""
        return f"__{self.rank}_0.distcp"

    @property
    def nbytes(self) -> int:
        """The bytes of the entries in the file."""
        return self.entries[-1].start + self.entries[-1].length if self.entries else 0


class Contents(NamedTuple):
    """The tensors, plans and names of a checkpoint, from which the coordinator writes the metadata."""

    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    plans: list[RankPlan]
    paths: dict[str, Path]


class Plan(NamedTuple):
    """The plans of the ranks of this process, and on the coordinator the contents of the checkpoint."""

    mine: list[RankPlan]
    contents: Contents | None


class _CachedPlan(NamedTuple):
    key: tuple[object, ...]
    plan: Plan


class PlanCache:
    """The plan of the last save, and how often a new one was computed."""

    def __init__(self) -> None:
        self.last: _CachedPlan | None = None
        self.made = 0


PLANS = WorldState(PlanCache)
_alone = PlanCache()


def plan_cache() -> PlanCache:
    """Return the plan cache of the present world."""
    return PLANS.of(runtime_of_world()) if torch.distributed.is_initialized() else _alone


def plan_save(
    state: FlatState,
    ranks: Ranks,
    what: str,
    begin: Callable[[], None] = lambda: None,
    cache: PlanCache | None = None,
) -> Plan:
    """Return the plan of a save: the last one if names, dtypes, shapes and placements are unchanged on all ranks.

    `begin` is called first; if it fails on one rank, all ranks raise its error. Error messages start with `what`.
    """
    cache = cache or plan_cache()
    key: tuple[object, ...] = ()

    def is_unchanged() -> bool:
        nonlocal key
        begin()
        key = _key(state)
        return cache.last is not None and cache.last.key == key

    if agreed(ranks, what, is_unchanged):
        assert cache.last is not None
        return cache.last.plan
    plan = through_coordinator(
        ranks, what, lambda: _Described.of(state, ranks), lambda described: _plans(described, ranks.size)
    )
    cache.last = _CachedPlan(key, plan)
    cache.made += 1
    return plan


def _key(state: FlatState) -> tuple[object, ...]:
    """Return the cache key of a plan. Specs are interned, so they are compared by identity."""
    return tuple((name, path, _kind(name, state.values[name])) for name, path in state.paths.items())


def _kind(name: str, value: object) -> object:
    """Return what the plan depends on in a value; of another library's tensor, also the boxes that this rank holds."""
    if isinstance(value, DTensorBase):
        return value._spec
    if not isinstance(value, Tensor):
        return None
    boxes = boxes_of(chunks_of_other(name, value)) if is_other(value) else None
    return value.dtype, value.shape, boxes


class _Described(NamedTuple):
    """The boxes and objects that the ranks of one process hold."""

    held: dict[int, list[Held]]
    objects: list[str]
    paths: dict[str, Path]

    @staticmethod
    def of(state: FlatState, ranks: Ranks) -> _Described:
        held: dict[int, list[Held]] = {rank: [] for rank in ranks.mine}
        objects = []
        for name, value in state.values.items():
            if not isinstance(value, Tensor):
                objects.append(name)
                continue
            for rank, chunks in chunks_of(name, value, ranks).items():
                held[rank].append(Held(name, value.dtype, shape_of(value), boxes_of(chunks)))
        return _Described(held, objects, state.paths)


def _plans(described: list[_Described], ranks: int) -> list[Plan]:
    """Return the plan of each process; the first process is the coordinator."""
    contents = _contents(described, ranks)
    mine = [[contents.plans[rank] for rank in item.held] for item in described]
    return [Plan(plans, None if process else contents) for process, plans in enumerate(mine)]


def _contents(described: list[_Described], ranks: int) -> Contents:
    held = {rank: tensors for item in described for rank, tensors in item.held.items()}
    tensors = merged(held)
    check_complete(tensors)
    pieces = spread(tensors, ranks)
    objects = _first_owners(described)
    plans = [RankPlan(rank, _placed(pieces[rank]), objects.get(rank, [])) for rank in range(ranks)]
    paths: dict[str, Path] = {}
    for item in reversed(described):
        paths.update(item.paths)
    return Contents(tensors.described, plans, paths)


def _first_owners(described: list[_Described]) -> dict[int, list[str]]:
    """Return the names of the objects that each rank writes. The first rank that has a name writes it."""
    found: dict[int, list[str]] = {}
    seen: set[str] = set()
    for item in described:
        rank = min(item.held)
        found[rank] = [name for name in item.objects if name not in seen]
        seen.update(item.objects)
    return found


def _placed(pieces: list[Piece]) -> list[Entry]:
    entries, end = [], 0
    for piece in pieces:
        archive = archive_of(piece.dtype, piece.size)
        start = -(-end // ALIGNMENT) * ALIGNMENT
        entries.append(Entry(piece, start, archive.length, start + len(archive.before)))
        end = start + archive.length
    return entries


def sources(state: Mapping[str, object], plans: list[RankPlan], ranks: Ranks) -> list[list[Tensor]]:
    """Return for each plan the tensors that hold the elements of its entries: views of the state."""
    held: dict[tuple[int, str, tuple[int, ...]], Tensor] = {}
    for name in dict.fromkeys(entry.piece.name for plan in plans for entry in plan.entries):
        tensor = state[name]
        assert isinstance(tensor, Tensor), "entries are pieces of tensors"
        for rank, chunks in chunks_of(name, tensor, ranks).items():
            held.update({(rank, name, tuple(chunk.offset)): chunk.data for chunk in chunks})
    return [
        [_part(held[plan.rank, entry.piece.name, entry.piece.inside], entry.piece) for entry in plan.entries]
        for plan in plans
    ]


def _part(tensor: Tensor, piece: Piece) -> Tensor:
    for dim, (first, begin, length) in enumerate(zip(piece.inside, piece.offset, piece.size, strict=True)):
        if tensor.shape[dim] != length:
            tensor = tensor.narrow(dim, begin - first, length)
    return tensor
