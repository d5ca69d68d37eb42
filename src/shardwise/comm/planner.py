"""The planner: the cheapest way from one layout to another, by A* over distribution states.

A state says, for each slot (a factor that source and target share), which axes cut it, major to minor, and which
axes are still Partial. Edges are the moves in `moves_from`; their costs come from `Links`. From every state an
exchange leads straight to the target, so the search has an upper bound from its first step. No state between
source and target may hold more than the larger of the two.

Everything here is arithmetic on layouts: no tensors, no process groups, no rank.
"""

from __future__ import annotations

import heapq
import itertools
import math
from functools import lru_cache

from ..errors import CommunicationError
from ..sharding.layout import Factor, Layout
from .cost import Links
from .plan import EXCHANGE, SLICE, Plan, Step
from .states import Axes, DistState, Edge, Slots, Task, common_slots, held, lacking, moves_from, product

_LOCAL_STEP = 1e-6  # seconds: of two plans that cost the same, the one with fewer local steps wins


@lru_cache(maxsize=16384)
def make_plan(
    source: Layout, target: Layout, itemsize: int, links: Links, groups: frozenset[Axes] | None = None
) -> Plan:
    """The cheapest plan. `groups` are the sets of axes whose ranks can talk together (None: any set)."""
    if source.shape != target.shape or source.mesh_sizes != target.mesh_sizes:
        raise CommunicationError(f"no plan from {source} to {target}", "shape and mesh must be the same")
    slots = common_slots(source, target)
    if slots is None:
        return _plan_without_slots(source, target, itemsize, links, groups)
    nbytes = math.prod(source.shape) * itemsize
    # Sizes matter only as bytes, and bytes only by their order of magnitude: a new batch size needs no new search.
    about = 1 << max(0, nbytes - 1).bit_length()
    path = shortest(source.mesh_sizes, slots.source, slots.target, about, links, groups)
    if path is None:
        raise CommunicationError(
            f"no way from {source} to {target} over single axes", "use a mesh that spans the whole world"
        )
    return _as_plan(source, target, slots, path, nbytes, links)


Path = tuple[tuple[DistState, Edge], ...]
"""The edges of a way, each with the state it leaves."""


@lru_cache(maxsize=16384)
def shortest(
    mesh_sizes: tuple[int, ...],
    source: DistState,
    target: DistState,
    nbytes: int,
    links: Links,
    groups: frozenset[Axes] | None,
) -> Path | None:
    """The cheapest way between two states of a tensor of about so many bytes; None if there is none."""
    task = Task(mesh_sizes, source, target, links.bandwidth, groups)
    search = _Search(task, nbytes, links)
    found = search.run(task.capacity)
    # Where groups are missing, a detour may need more memory than source and target.
    return search.run(math.inf) if found is None else found


def _as_plan(source: Layout, target: Layout, slots: Slots, path: Path, nbytes: int, links: Links) -> Plan:
    mesh_sizes = source.mesh_sizes
    steps = []
    for before, edge in path:
        start, end = slots.layout(mesh_sizes, before), slots.layout(mesh_sizes, edge.after)
        steps.append(Step(edge.kind, edge.axes, start, end, edge.fraction * nbytes, edge.op))
    seconds = sum(_seconds(links, mesh_sizes, step.kind, step.axes, step.received) for step in steps)
    return Plan(source, target, tuple(steps), seconds)


class _Search:
    """A* from one state to another."""

    def __init__(self, task: Task, nbytes: int, links: Links) -> None:
        self.task, self.nbytes, self.links = task, nbytes, links
        self.fastest = max(links.bandwidth)
        # Seconds of a move over some axes: fixed, and for each part of the whole tensor received.
        self.prices: dict[tuple[str, Axes], tuple[float, float]] = {}

    def run(self, capacity: float) -> Path | None:
        """The cheapest way that never holds more than this part of the whole; None if there is none."""
        task, end = self.task, self.task.target
        start = task.source
        best: dict[DistState, float] = {start: 0.0}
        arrived_by: dict[DistState, tuple[DistState, Edge]] = {}
        queue = [(self._at_least(start), 0, start)]
        done: set[DistState] = set()
        pushed = 0
        while queue:
            _, _, state = heapq.heappop(queue)
            if state == end:
                return self._path(arrived_by)
            if state in done:
                continue
            done.add(state)
            if state != start and len(done) == 2 and best.get(end, math.inf) <= self._two_collectives():
                return self._path(arrived_by)  # one collective reaches the target, and any two cost more
            for edge in moves_from(task, state, capacity):
                after = edge.after
                cost = best[state] + self.seconds(edge)
                if after in done or cost >= best.get(after, math.inf):
                    continue
                estimate = cost + self._at_least(after)
                if after != end and estimate >= best.get(end, math.inf):
                    continue
                best[after] = cost
                arrived_by[after] = (state, edge)
                pushed += 1
                heapq.heappush(queue, (estimate, pushed, after))
        return None

    def seconds(self, edge: Edge) -> float:
        """The modelled time of one edge."""
        key = edge.kind, edge.axes
        price = self.prices.get(key)
        if price is None:
            fixed = _seconds(self.links, self.task.mesh_sizes, *key, 0.0)
            price = self.prices[key] = fixed, _seconds(self.links, self.task.mesh_sizes, *key, self.nbytes) - fixed
        return price[0] + edge.fraction * price[1]

    def _two_collectives(self) -> float:
        """A time that no way with two or more collectives can undercut."""
        smallest = min((size for size in self.task.mesh_sizes if size > 1), default=1)
        latency = self.links.latency + self.links.peer_latency * (smallest - 1)
        return self._at_least(self.task.source) - self.links.latency + 2 * latency

    def _at_least(self, state: DistState) -> float:
        """A time that no path from this state can undercut."""
        task = self.task
        if state.partial != task.target.partial:
            if not any(entry in task.reducing for entry in state.partial):
                return 0.0
            added = product(task.mesh_sizes, [a for a, _ in task.target.partial if a not in dict(state.partial)])
            fraction = held(task.mesh_sizes, task.target) / added
        else:
            fraction = lacking(task.mesh_sizes, state, task.target)
            if fraction <= 1e-12:
                return 0.0
        return self.links.latency + fraction * self.nbytes / self.fastest

    def _path(self, arrived_by: dict[DistState, tuple[DistState, Edge]]) -> Path:
        path = []
        state = self.task.target
        while state != self.task.source:
            before, edge = arrived_by[state]
            path.append((before, edge))
            state = before
        return tuple(reversed(path))


def _seconds(links: Links, mesh_sizes: tuple[int, ...], kind: str, axes: Axes, received: float) -> float:
    if not axes:
        return _LOCAL_STEP
    time = links.seconds(axes, product(mesh_sizes, axes) - 1, received) + _LOCAL_STEP
    # Any-to-any moves are packed piece by piece; the other collectives take the tensor as it is, or nearly so.
    return time + links.pack * received + _LOCAL_STEP if kind == EXCHANGE else time


def _plan_without_slots(
    source: Layout, target: Layout, itemsize: int, links: Links, groups: frozenset[Axes] | None
) -> Plan:
    """Layouts without common factors: finish the reductions, exchange, then make Partial what must be."""
    middle, goal = source.without_partial(), target.without_partial()
    axes = tuple(sorted({a for dim in middle.dims for factor in dim for a in factor.axes}))
    if axes and groups is not None and axes not in groups:
        whole = Layout.make(source.mesh_sizes, tuple((Factor(size, ()),) for size in source.shape))
        stops = [source, middle, whole, goal, target]
    else:
        stops = [source, middle, goal, target]
    steps: list[Step] = []
    for before, after in itertools.pairwise(stops):
        if before is middle and after is goal and before is not after:
            received = float(goal.max_local_numel() * itemsize) if axes else 0.0
            steps.append(Step(EXCHANGE if axes else SLICE, axes, before, after, received))
        elif before is not after:
            steps.extend(make_plan(before, after, itemsize, links, groups).steps)
    seconds = sum(_seconds(links, source.mesh_sizes, step.kind, step.axes, step.received) for step in steps)
    return Plan(source, target, tuple(steps), seconds)
