"""The graph the planner searches: the edges that lead from one distribution state to others.

The order of the edges decides between plans of equal cost, so it must be the same in every process: no edge comes from
an iteration over a set.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from ..sharding.layout import Sizes
from .plan import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, EXCHANGE, REDUCE_SCATTER, SLICE, TO_PARTIAL
from .states import Axes, DistState, axes_to_exchange_over, held, lacking, product

_SLACK = 1.0 + 1e-9


class Edge(NamedTuple):
    """A step of a search: its kind, the axes of its group, the state after it, and what a rank receives.

    `fraction` is what a rank receives, as a fraction of the global tensor.
    """

    kind: str
    axes: Axes
    after: DistState
    fraction: float
    op: str = ""


def commute(ops: set[str]) -> bool:
    """Return whether reductions by these ops over different axes can be done in any order."""
    return len(ops) <= 1 or ops <= {"sum", "avg"}


class Task:
    """Source and target of a search, and what follows from them."""

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
        """The Partial axes to reduce, each with its op: all of them if any changes and the ops do not commute."""
        kept = set(self.source.partial) & set(self.target.partial)
        everything = set(self.source.partial) | set(self.target.partial)
        if kept != everything and not commute({op for _, op in everything}):
            kept = set()
        return frozenset(set(self.source.partial) - kept)

    @cached_property
    def useful_slices(self) -> tuple[int, ...]:
        """The axes to try slicing over: those of the target, and any faster than the slowest axis in use."""
        wanted = {axis for axes in self.target.slots for axis in axes}
        in_use = wanted | {a for axes in self.source.slots for a in axes} | {a for a, _ in self.source.partial}
        slowest = min((self.bandwidth[axis] for axis in in_use), default=0.0)
        faster = {a for a, size in enumerate(self.mesh_sizes) if size > 1 and self.bandwidth[a] > slowest}
        return tuple(sorted(wanted | (faster if in_use else set())))

    def has_group(self, axes: Axes) -> bool:
        """Return whether there is a process group over these axes."""
        return self.groups is None or len(axes) == 1 or axes in self.groups


def edges_from(task: Task, state: DistState, capacity: float) -> Iterator[Edge]:
    """Yield the edges that may help to reach the target.

    After an edge no rank holds more than `capacity`, a fraction of the global tensor.
    """
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
    for axis in task.useful_slices:
        if axis in used:
            continue
        for i, axes in enumerate(state.slots):
            yield Edge(SLICE, (), DistState(_replace(state.slots, i, (*axes, axis)), state.partial), 0.0)


def _gathers(task: Task, state: DistState, capacity: float) -> Iterator[Edge]:
    """Yield gathers of the minor axes of one or more slots, each in one collective."""
    now = held(task.mesh_sizes, state)
    for kept in itertools.product(*([axes[:k] for k in range(len(axes), -1, -1)] for axes in state.slots)):
        after = DistState(kept, state.partial)
        grown = held(task.mesh_sizes, after)
        if grown == now or grown > capacity:
            continue
        gathered = [a for axes, left in zip(state.slots, kept, strict=True) for a in axes[len(left) :]]
        group = tuple(sorted(gathered))
        if task.has_group(group):
            yield Edge(ALL_GATHER, group, after, grown - now)


def _all_to_alls(task: Task, state: DistState) -> Iterator[Edge]:
    """Yield all-to-alls that move the minor axes of one slot to another, as its minor axes."""
    now = held(task.mesh_sizes, state)
    for i, axes in enumerate(state.slots):
        for start in range(len(axes)):
            moved = axes[start:]
            if not task.has_group(group := tuple(sorted(moved))):
                continue
            peers = product(task.mesh_sizes, moved)
            without = _replace(state.slots, i, axes[:start])
            for j, others in enumerate(state.slots):
                if j != i:
                    after = DistState(_replace(without, j, others + moved), state.partial)
                    yield Edge(ALL_TO_ALL, group, after, now * (peers - 1) / peers)


def _exchanges(task: Task, state: DistState) -> Iterator[Edge]:
    """Yield the exchange straight to the target, and one that only brings each slot's axes into the target's order."""
    reordered = []
    for have, want in zip(state.slots, task.target.slots, strict=True):
        common = tuple(axis for axis in want if axis in have)
        reordered.append(common + tuple(axis for axis in have if axis not in want))
    for after in dict.fromkeys((task.target, DistState(tuple(reordered), state.partial))):
        axes = axes_to_exchange_over(state, after)
        if after != state and axes and task.has_group(axes):
            yield Edge(EXCHANGE, axes, after, lacking(task.mesh_sizes, state, after))


def _reductions(task: Task, state: DistState) -> Iterator[Edge]:
    """Yield all-reduces and reduce-scatters (onto a slot) over Partial axes of one op, or of sums and averages."""
    now = held(task.mesh_sizes, state)
    for axes, op in reducible_together([entry for entry in state.partial if entry in task.reducing]):
        rest = tuple(entry for entry in state.partial if entry[0] not in axes)
        # Inner axes (to the right) are reduced first, unless the order does not matter.
        inner = {its_op for axis, its_op in rest if axis > axes[0]}
        if not commute(inner | {op}) or not task.has_group(axes):
            continue
        peers = product(task.mesh_sizes, axes)
        scattered = now * (peers - 1) / peers
        yield Edge(ALL_REDUCE, axes, DistState(state.slots, rest), 2 * scattered, op)
        for order in itertools.permutations(axes):
            for i, slot_axes in enumerate(state.slots):
                after = DistState(_replace(state.slots, i, slot_axes + order), rest)
                yield Edge(REDUCE_SCATTER, axes, after, scattered, op)


def reducible_together(entries: Sequence[tuple[int, str]]) -> Iterator[tuple[Axes, str]]:
    """Yield the sets of Partial axes that one collective can reduce, each with its op.

    An average is a sum of operands that are divided first, so sums and averages are reduced together as a sum.
    """
    ops = dict(entries)
    for count in range(1, len(ops) + 1):
        for axes in itertools.combinations(ops, count):
            of_axes = {ops[axis] for axis in axes}
            if len(of_axes) == 1 or of_axes == {"sum", "avg"}:
                yield axes, ops[axes[0]] if len(of_axes) == 1 else "sum"


def _to_partials(task: Task, state: DistState, capacity: float) -> Iterator[Edge]:
    """Yield edges that make a replicated axis, or the minor axis of a slot, Partial without communication."""
    for axis, op in task.target.partial:
        if axis in dict(state.partial):
            continue
        # Axes are reduced from right to left. Those to the right would reduce the identities filled in here by
        # another op first; those to the left see only the restored value.
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
