"""The planner: the cheapest way from one layout to another, by A* over distribution states.

A state says, for each slot (a factor that source and target share), which axes shard it, major to minor, and which
axes are still Partial. Edges come from `edges_from`, their costs from `Links`. From every state with the target's
Partial axes an exchange leads straight to the target, which gives the search an early upper bound. No state between
source and target may hold more than the larger of the two, unless process groups are missing.

The search treats all shards as even. Where they are not, a gather or reduce-scatter on its path is carried out with
padded pieces, or as an exchange of exact ones, whichever costs less (`_native_or_exchange`).

Everything here is arithmetic on layouts: no tensors, no process groups, no ranks.
"""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import replace
from functools import lru_cache

from ..errors import CommunicationError
from ..sharding.layout import Factor, Layout
from .cost import LOCAL_STEP, Links
from .edges import Edge, Task, edges_from
from .plan import ALL_GATHER, ALL_TO_ALL, EXCHANGE, REDUCE_SCATTER, SLICE, Plan, Step, least_piece, pieces_of
from .states import Axes, DistState, Slots, common_slots, held, lacking, product


@lru_cache(maxsize=16384)
def make_plan(
    source: Layout, target: Layout, itemsize: int, links: Links, groups: frozenset[Axes] | None = None
) -> Plan:
    """Return the cheapest plan. `groups` are the sets of axes whose ranks have a process group (None: all sets)."""
    if source.shape != target.shape or source.mesh_sizes != target.mesh_sizes:
        raise CommunicationError(
            f"there is no plan from {source} to {target}: their shapes or meshes differ",
            "redistribute between layouts of one tensor on one mesh",
        )
    slots = common_slots(source, target)
    if slots is None:
        return _plan_without_slots(source, target, itemsize, links, groups)
    nbytes = source.numel() * itemsize
    # Sizes matter only as bytes, and bytes only by their order of magnitude: a new batch size needs no new search.
    about = 1 << max(0, nbytes - 1).bit_length()
    path = shortest(source.mesh_sizes, slots.source, slots.target, about, links, groups)
    if path is None:
        raise CommunicationError(
            f"there is no plan from {source} to {target} with the process groups of this submesh, which has none over "
            "some sets of axes",
            "use the mesh that it was sliced from: groups over several axes are created for a mesh of all ranks only",
        )
    return _as_plan(source, target, slots, path, itemsize, links)


Path = tuple[tuple[DistState, Edge], ...]
"""The edges of a path, each with the state before it."""


@lru_cache(maxsize=16384)
def shortest(
    mesh_sizes: tuple[int, ...],
    source: DistState,
    target: DistState,
    nbytes: int,
    links: Links,
    groups: frozenset[Axes] | None,
) -> Path | None:
    """Return the cheapest path between two states of a tensor of about `nbytes` bytes, or None."""
    task = Task(mesh_sizes, source, target, links.bandwidth, groups)
    search = _Search(task, nbytes, links)
    found = search.run(task.capacity)
    # Where groups are missing, a detour may need more memory than source and target.
    return search.run(math.inf) if found is None else found


def _as_plan(source: Layout, target: Layout, slots: Slots, path: Path, itemsize: int, links: Links) -> Plan:
    mesh_sizes, nbytes = source.mesh_sizes, source.numel() * itemsize
    steps, seconds = [], 0.0
    for before, edge in path:
        start, end = slots.layout(mesh_sizes, before), slots.layout(mesh_sizes, edge.after)
        received = edge.fraction * nbytes
        time = _seconds(links, mesh_sizes, edge.kind, edge.axes, received)
        step = Step(edge.kind, edge.axes, start, end, received, edge.op, time)
        if nbytes and step.kind in (ALL_GATHER, REDUCE_SCATTER) and not (start.is_even() and end.is_even()):
            step, time = _native_or_exchange(step, itemsize, links)
            step = replace(step, seconds=time)
        steps.append(step)
        seconds += time
    return Plan(source, target, tuple(steps), seconds)


def _native_or_exchange(step: Step, itemsize: int, links: Links) -> tuple[Step, float]:
    """Return the cheaper way to carry out an uneven gather or reduce-scatter, and its seconds.

    The native collective sends pieces of one size, padded by a copy. An exchange sends what each rank lacks.
    """
    mesh_sizes, peers = step.before.mesh_sizes, product(step.before.mesh_sizes, step.axes)
    largest, least = pieces_of(step).max_local_numel() * itemsize, least_piece(step) * itemsize
    padded = replace(step, received=float(largest * (peers - 1)))
    native = _seconds(links, mesh_sizes, step.kind, step.axes, padded.received)
    if not step.is_padded:  # the ranks of a group have pieces of one size, though those of other groups differ
        return padded, native
    native += LOCAL_STEP + links.pack * (largest if step.kind == ALL_GATHER else largest * peers)
    lacking = step.after.max_local_numel() * itemsize - least if step.kind == ALL_GATHER else padded.received
    exact = replace(step, kind=EXCHANGE, received=float(lacking))
    exchanged = _seconds(links, mesh_sizes, EXCHANGE, step.axes, exact.received)
    if step.op:  # the operands are put together and reduced by this rank
        exchanged += 2 * links.pack * exact.received
    return (padded, native) if native <= exchanged else (exact, exchanged)


class _Search:
    """A* from one state to another."""

    def __init__(self, task: Task, nbytes: int, links: Links) -> None:
        self.task, self.nbytes, self.links = task, nbytes, links
        # No collective is faster than these, whichever way it sends.
        self.fastest = max(links.ring.bandwidth + links.p2p.bandwidth)
        self.latency = min(links.ring.latency + links.p2p.latency)
        # By kind and axes of an edge: its fixed seconds, and the seconds for receiving the global tensor.
        self.prices: dict[tuple[str, Axes], tuple[float, float]] = {}

    def run(self, capacity: float) -> Path | None:
        """Return the cheapest path on which no rank holds more than this fraction of the tensor, or None."""
        task, end = self.task, self.task.target
        start = task.source
        best: dict[DistState, float] = {start: 0.0}
        reached_by: dict[DistState, tuple[DistState, Edge]] = {}
        queue = [(self._lower_bound(start), 0, start)]
        done: set[DistState] = set()
        pushed = 0
        while queue:
            _, _, state = heapq.heappop(queue)
            if state == end:
                return self._path(reached_by)
            if state in done:
                continue
            done.add(state)
            if state != start and len(done) == 2 and end in best and self._is_best(reached_by[end][1], best[end]):
                return self._path(reached_by)
            for edge in edges_from(task, state, capacity):
                after = edge.after
                cost = best[state] + self.seconds(edge)
                if after in done or cost >= best.get(after, math.inf):
                    continue
                estimate = cost + self._lower_bound(after)
                if after != end and estimate >= best.get(end, math.inf):
                    continue
                best[after] = cost
                reached_by[after] = (state, edge)
                pushed += 1
                heapq.heappush(queue, (estimate, pushed, after))
        return None

    def seconds(self, edge: Edge) -> float:
        """Return the modelled time of one edge."""
        key = edge.kind, edge.axes
        price = self.prices.get(key)
        if price is None:
            fixed = _seconds(self.links, self.task.mesh_sizes, *key, 0.0)
            price = self.prices[key] = fixed, _seconds(self.links, self.task.mesh_sizes, *key, self.nbytes) - fixed
        return price[0] + edge.fraction * price[1]

    def _is_best(self, last: Edge, cost: float) -> bool:
        """Return whether the edge `last` is the best path: of the cheaper kind, and cheaper than two collectives."""
        mine, other = (self.links.p2p, self.links.ring) if _is_p2p(last.kind) else (self.links.ring, self.links.p2p)
        return (mine is other or mine.at_most(other)) and cost <= self._two_collectives()

    def _two_collectives(self) -> float:
        """Return a lower bound on the time of paths with two or more collectives."""
        smallest = min((size for size in self.task.mesh_sizes if size > 1), default=1)
        peer_latency = min(self.links.ring.peer_latency, self.links.p2p.peer_latency)
        latency = self.latency + peer_latency * (smallest - 1)
        return self._lower_bound(self.task.source) - self.latency + 2 * latency

    def _lower_bound(self, state: DistState) -> float:
        """Return a lower bound on the time of paths from this state to the target."""
        task = self.task
        if state.partial != task.target.partial:
            # An entry that is also in the target may have been reduced and made Partial again.
            if not any(entry in task.reducing and entry not in task.target.partial for entry in state.partial):
                return 0.0
            added = product(task.mesh_sizes, [a for a, _ in task.target.partial if a not in dict(state.partial)])
            fraction = held(task.mesh_sizes, task.target) / added
        else:
            fraction = lacking(task.mesh_sizes, state, task.target)
            if fraction <= 1e-12:
                return 0.0
        return self.latency + fraction * self.nbytes / self.fastest

    def _path(self, reached_by: dict[DistState, tuple[DistState, Edge]]) -> Path:
        path = []
        state = self.task.target
        while state != self.task.source:
            before, edge = reached_by[state]
            path.append((before, edge))
            state = before
        return tuple(reversed(path))


def _is_p2p(kind: str) -> bool:
    return kind in (ALL_TO_ALL, EXCHANGE)


def _seconds(links: Links, mesh_sizes: tuple[int, ...], kind: str, axes: Axes, received: float) -> float:
    if not axes:
        return LOCAL_STEP
    rates = links.p2p if _is_p2p(kind) else links.ring
    time = rates.seconds(axes, product(mesh_sizes, axes) - 1, received) + LOCAL_STEP
    # An exchange is packed box by box; the other collectives send the tensor itself, or one permutation of it.
    return time + links.pack * received + LOCAL_STEP if kind == EXCHANGE else time


def _plan_without_slots(
    source: Layout, target: Layout, itemsize: int, links: Links, groups: frozenset[Axes] | None
) -> Plan:
    """Return the plan between layouts without common slots: reduce, exchange, then make axes Partial."""
    middle, goal = source.without_partial(), target.without_partial()
    axes = tuple(sorted({a for dim in middle.dims for factor in dim for a in factor.axes}))
    if axes and groups is not None and axes not in groups:
        replicated = Layout.make(source.mesh_sizes, tuple((Factor(size, ()),) for size in source.shape))
        stops = [source, middle, replicated, goal, target]
    else:
        stops = [source, middle, goal, target]
    steps: list[Step] = []
    for before, after in itertools.pairwise(stops):
        if before is middle and after is goal and before is not after:
            received = float(goal.max_local_numel() * itemsize) if axes else 0.0
            steps.append(Step(EXCHANGE if axes else SLICE, axes, before, after, received))
        elif before is not after:
            steps.extend(make_plan(before, after, itemsize, links, groups).steps)
    priced = [
        replace(step, seconds=_seconds(links, source.mesh_sizes, step.kind, step.axes, step.received)) for step in steps
    ]
    return Plan(source, target, tuple(priced), sum(step.seconds for step in priced))
