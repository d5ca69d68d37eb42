"""The graph the planner searches: distribution states, and the moves that lead from one to another."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from ..sharding.layout import Dim, Factor, Layout, PartialAxes, Sizes, split_factor
from .plan import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, EXCHANGE, REDUCE_SCATTER, SLICE, TO_PARTIAL

Axes = tuple[int, ...]
_SLACK = 1.0 + 1e-9


class DistState(NamedTuple):
    """Which axes cut each slot, major to minor, and which axes are Partial by which op."""

    slots: tuple[Axes, ...]
    partial: PartialAxes


class Edge(NamedTuple):
    """A move: its kind, the axes whose ranks talk, where it leads, what a rank receives (part of the whole)."""

    kind: str
    axes: Axes
    after: DistState
    fraction: float
    op: str = ""


# ---- slots ---------------------------------------------------------------------------------------------------


class Slots(NamedTuple):
    """The factor sizes that source and target share, dim by dim, and both layouts as states over them."""

    sizes: tuple[tuple[int, ...], ...]
    source: DistState
    target: DistState

    def layout(self, mesh_sizes: Sizes, state: DistState) -> Layout:
        """A state as a layout."""
        axes = iter(state.slots)
        dims = [tuple(Factor(size, next(axes)) for size in dim) for dim in self.sizes]
        return Layout.make(mesh_sizes, dims, state.partial)


def common_slots(source: Layout, target: Layout) -> Slots | None:
    """Both layouts over factors of the same sizes; None where their cuts fall on different boundaries.

    Axes of size 1 do nothing and are left out.
    """
    mesh_sizes = source.mesh_sizes
    plain = all(len(dim) == 1 for dim in source.dims) and all(len(dim) == 1 for dim in target.dims)
    if plain and 1 not in mesh_sizes:  # nothing to refine, the usual case
        return Slots(
            tuple([(dim[0].size,) for dim in source.dims]),
            DistState(tuple([dim[0].axes for dim in source.dims]), source.partial),
            DistState(tuple([dim[0].axes for dim in target.dims]), target.partial),
        )
    sizes, source_axes, target_axes = [], [], []
    for one, other in zip(source.dims, target.dims, strict=True):
        pair = _refine(mesh_sizes, _drop_single(mesh_sizes, one), _drop_single(mesh_sizes, other))
        if pair is None:
            return None
        sizes.append(tuple(factor.size for factor in pair[0]))
        source_axes += [factor.axes for factor in pair[0]]
        target_axes += [factor.axes for factor in pair[1]]

    def state(axes: list[Axes], layout: Layout) -> DistState:
        return DistState(tuple(axes), tuple(entry for entry in layout.partial if mesh_sizes[entry[0]] > 1))

    return Slots(tuple(sizes), state(source_axes, source), state(target_axes, target))


def _drop_single(mesh_sizes: Sizes, dim: Dim) -> Dim:
    return tuple(Factor(f.size, tuple(a for a in f.axes if mesh_sizes[a] > 1)) for f in dim)


def _refine(mesh_sizes: Sizes, one: Dim, other: Dim) -> tuple[Dim, Dim] | None:
    """Split the factors of two dims of equal size until their sizes agree."""
    left, right = list(one), list(other)
    done: tuple[list[Factor], list[Factor]] = ([], [])
    while left and right:
        a, b = left.pop(0), right.pop(0)
        if a.size != b.size:
            larger, smaller, rest = (a, b, left) if a.size > b.size else (b, a, right)
            parts = split_factor(mesh_sizes, larger, smaller.size)
            if parts is None:
                return None
            rest.insert(0, parts[1])
            a, b = (parts[0], b) if larger is a else (a, parts[0])
        done[0].append(a)
        done[1].append(b)
    if any(factor.size != 1 or factor.axes for factor in left + right):
        return None
    return tuple(done[0]), tuple(done[1])


# ---- sizes -----------------------------------------------------------------------------------------------------


def product(mesh_sizes: Sizes, axes: Sequence[int]) -> int:
    """The number of ranks over these axes."""
    result = 1
    for axis in axes:
        result *= mesh_sizes[axis]
    return result


def held(mesh_sizes: Sizes, state: DistState) -> float:
    """What a rank holds, as a part of the whole tensor."""
    pieces = 1
    for axes in state.slots:
        for axis in axes:
            pieces *= mesh_sizes[axis]
    return 1.0 / pieces


def lacking(mesh_sizes: Sizes, state: DistState, target: DistState) -> float:
    """The most that any rank lacks of its target, as a part of the whole: no plan can receive less."""
    finest = wanted = 1
    diverges = False
    for have, want in zip(state.slots, target.slots, strict=True):
        pieces_want = product(mesh_sizes, want)
        wanted *= pieces_want
        if have == want:
            finest *= pieces_want
            continue
        shared = min(len(have), len(want))
        diverges = diverges or have[:shared] != want[:shared]
        finest *= max(product(mesh_sizes, have), pieces_want)
    return 1.0 / wanted - (0.0 if diverges else 1.0 / finest)


def talking_axes(state: DistState, target: DistState) -> Axes:
    """The axes of an exchange: those of each source slot beyond what the target cuts alike."""
    axes: list[int] = []
    for have, want in zip(state.slots, target.slots, strict=True):
        shared = 0
        while shared < min(len(have), len(want)) and have[shared] == want[shared]:
            shared += 1
        axes += have[shared:]
    return tuple(sorted(axes))


# ---- moves -----------------------------------------------------------------------------------------------------


def commute(ops: set[str]) -> bool:
    """Whether reductions by these ops over different axes may be done in any order."""
    return len(ops) <= 1 or ops <= {"sum", "avg"}


class Task:
    """Source, target, and what follows from them once for a whole search."""

    def __init__(
        self,
        mesh_sizes: Sizes,
        source: DistState,
        target: DistState,
        bandwidth: tuple[float, ...],
        groups: frozenset[Axes] | None,
    ) -> None:
        self.mesh_sizes, self.source, self.target = mesh_sizes, source, target
        self.bandwidth, self.groups = bandwidth, groups
        self.capacity = max(held(mesh_sizes, source), held(mesh_sizes, target))

    @cached_property
    def reducing(self) -> frozenset[tuple[int, str]]:
        """The reductions that must be done. If some Partial axis changes and the ops do not commute: all."""
        kept = set(self.source.partial) & set(self.target.partial)
        everything = set(self.source.partial) | set(self.target.partial)
        if kept != everything and not commute({op for _, op in everything}):
            kept = set()
        return frozenset(set(self.source.partial) - kept)

    @cached_property
    def useful_cuts(self) -> frozenset[int]:
        """The axes worth slicing over: the target's, and faster ones than some axis in play, for a detour."""
        wanted = {axis for axes in self.target.slots for axis in axes}
        playing = wanted | {a for axes in self.source.slots for a in axes} | {a for a, _ in self.source.partial}
        slowest = min((self.bandwidth[axis] for axis in playing), default=0.0)
        faster = {a for a, size in enumerate(self.mesh_sizes) if size > 1 and self.bandwidth[a] > slowest}
        return frozenset(wanted | (faster if playing else set()))

    def can_talk(self, axes: Axes) -> bool:
        """Whether the ranks over these axes have a group."""
        return self.groups is None or len(axes) == 1 or axes in self.groups


def moves_from(task: Task, state: DistState, capacity: float) -> Iterator[Edge]:
    """All moves that may help to reach the target, within a memory capacity."""
    if state.partial != task.target.partial:
        yield from _to_partials(task, state, capacity * _SLACK)
    else:
        yield from _exchanges(task, state)  # first, since it gives the search an upper bound
    if state.partial:
        yield from _reductions(task, state)
    yield from _slices(task, state)
    yield from _gathers(task, state, capacity * _SLACK)
    yield from _all_to_alls(task, state)


def _replace(slots: tuple[Axes, ...], index: int, axes: Axes) -> tuple[Axes, ...]:
    return (*slots[:index], axes, *slots[index + 1 :])


def _slices(task: Task, state: DistState) -> Iterator[Edge]:
    used = {axis for axes in state.slots for axis in axes} | {axis for axis, _ in state.partial}
    for axis in task.useful_cuts - used:
        for i, axes in enumerate(state.slots):
            yield Edge(SLICE, (), DistState(_replace(state.slots, i, (*axes, axis)), state.partial), 0.0)


def _gathers(task: Task, state: DistState, capacity: float) -> Iterator[Edge]:
    """The minor axes of one or more slots, gathered together."""
    now = held(task.mesh_sizes, state)
    for kept in itertools.product(*([axes[:k] for k in range(len(axes), -1, -1)] for axes in state.slots)):
        after = DistState(kept, state.partial)
        grown = held(task.mesh_sizes, after)
        if grown == now or grown > capacity:
            continue
        gathered = [a for axes, left in zip(state.slots, kept, strict=True) for a in axes[len(left) :]]
        group = tuple(sorted(gathered))
        if task.can_talk(group):
            yield Edge(ALL_GATHER, group, after, grown - now)


def _all_to_alls(task: Task, state: DistState) -> Iterator[Edge]:
    """The minor axes of a slot move to become the minor axes of another."""
    now = held(task.mesh_sizes, state)
    for i, axes in enumerate(state.slots):
        for start in range(len(axes)):
            moved = axes[start:]
            if not task.can_talk(group := tuple(sorted(moved))):
                continue
            peers = product(task.mesh_sizes, moved)
            without = _replace(state.slots, i, axes[:start])
            for j, others in enumerate(state.slots):
                if j != i:
                    after = DistState(_replace(without, j, others + moved), state.partial)
                    yield Edge(ALL_TO_ALL, group, after, now * (peers - 1) / peers)


def _exchanges(task: Task, state: DistState) -> Iterator[Edge]:
    """Straight to the target, or only to the target's order of the axes that a slot already has."""
    reordered = []
    for have, want in zip(state.slots, task.target.slots, strict=True):
        common = tuple(axis for axis in want if axis in have)
        reordered.append(common + tuple(axis for axis in have if axis not in want))
    for after in {task.target, DistState(tuple(reordered), state.partial)} - {state}:
        axes = talking_axes(state, after)
        if axes and task.can_talk(axes):
            yield Edge(EXCHANGE, axes, after, lacking(task.mesh_sizes, state, after))


def _reductions(task: Task, state: DistState) -> Iterator[Edge]:
    """All-reduce, or reduce-scatter onto a slot, over Partial axes of one op."""
    now = held(task.mesh_sizes, state)
    open_axes = [entry for entry in state.partial if entry in task.reducing]
    for op in dict.fromkeys(op for _, op in open_axes):
        alike = [axis for axis, its_op in open_axes if its_op == op]
        for count in range(1, len(alike) + 1):
            for axes in itertools.combinations(alike, count):
                rest = tuple(entry for entry in state.partial if entry[0] not in axes)
                # Inner axes (to the right) are reduced first, unless the order does not matter.
                inner = {its_op for axis, its_op in rest if axis > axes[0]}
                if not commute(inner | {op}) or not task.can_talk(axes):
                    continue
                peers = product(task.mesh_sizes, axes)
                part = now * (peers - 1) / peers
                yield Edge(ALL_REDUCE, axes, DistState(state.slots, rest), 2 * part, op)
                for order in itertools.permutations(axes):
                    for i, cuts in enumerate(state.slots):
                        after = DistState(_replace(state.slots, i, cuts + order), rest)
                        yield Edge(REDUCE_SCATTER, axes, after, part, op)


def _to_partials(task: Task, state: DistState, capacity: float) -> Iterator[Edge]:
    """A replicated or minor cut axis becomes Partial without communication."""
    for axis, op in task.target.partial:
        if axis in dict(state.partial):
            continue
        # A Partial axis to the left would see the identities filled in here; to the right is inside it, and safe.
        if not commute({op} | {its_op for other, its_op in state.partial if other > axis}):
            continue
        partial = tuple(sorted((*state.partial, (axis, op))))
        where = [i for i, axes in enumerate(state.slots) if axis in axes]
        if not where:
            yield Edge(TO_PARTIAL, (), DistState(state.slots, partial), 0.0, op)
        elif state.slots[where[0]][-1] == axis:
            after = DistState(_replace(state.slots, where[0], state.slots[where[0]][:-1]), partial)
            if held(task.mesh_sizes, after) <= capacity:
                yield Edge(TO_PARTIAL, (), after, 0.0, op)
