"""Plans for a tensor that changes its mesh: reduce what is Partial, then exchange between the ranks of both meshes.

A Partial tensor is reduced on the source mesh, to a replicated or sharded tensor, or by the receivers, which then get
the operands of all ranks. The cost model decides. If the target is Partial with a sum or product, the first rank of
each Partial axis gets the value, and the others hold the identity.

>>> print(plan_mesh_change(x.spec, y.spec))
f32[16@fsdp, 8] on mesh(fsdp=4) -> f32[16, 8@tp] on mesh(dp=2, tp=2)   1 collective, 192 B received by a rank
  1. exchange             over 4 ranks         192 B   f32[16, 8@tp]
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..errors import CommunicationError, MeshError
from ..sharding.layout import Factor, Layout, PartialAxes
from ..sharding.runtime import WorldCache
from ..sharding.spec import DTensorSpec
from ..sharding.spec_text import spec_text
from .cost import LOCAL_STEP, cost_model, links_of
from .mesh_routes import MeshPair, RouteKey, mesh_pair, route_of
from .plan import Plan, bytes_text, received_exactly
from .planner import make_plan
from .routes import Route
from .states import Axes
from .streaming import rounds_of, staged
from .transport import check_reducible


@dataclass(frozen=True)
class MeshChange:
    """The steps that move a tensor from one mesh to another. Prints them, with the most bytes that a rank receives."""

    source: DTensorSpec
    target: DTensorSpec
    pair: MeshPair
    reduction: Plan
    """The steps on the source mesh."""
    routes: tuple[Route, ...]
    """One, or one for each operand that the receivers reduce."""
    op: str
    divisor: int
    rounds: int
    seconds: float

    @property
    def received_by(self) -> dict[int, int]:
        """The bytes that each rank receives in the exchange. Ranks that receive none are left out."""
        totals: dict[int, int] = {}
        for route in self.routes:
            for rank, count in route.received.items():
                totals[rank] = totals.get(rank, 0) + count * self.source.dtype.itemsize
        return totals

    @property
    def received(self) -> float:
        """The most bytes that any rank receives, in the reduction and the exchange together."""
        itemsize = self.source.dtype.itemsize
        before = sum(received_exactly(step, itemsize) for step in self.reduction.steps)
        return before + max(self.received_by.values(), default=0)

    @property
    def exchanges(self) -> bool:
        """Whether any rank receives data."""
        return any(route.received for route in self.routes)

    @property
    def collectives(self) -> int:
        """The number of collectives."""
        return self.reduction.collectives + (self.rounds if self.exchanges else 0)

    @property
    def keeps_shards(self) -> bool:
        """Whether every rank's shard stays the same, so that nothing is copied."""
        if self.exchanges or self.source.layout.partial or self.target.layout.partial:
            return False
        have, need = self.pair.source, self.pair.target
        if have.ranks != need.ranks or have.device_type != need.device_type:
            return False
        source, target = self.source.layout, self.target.layout
        places = zip(have.coordinates, need.coordinates, strict=True)
        return all(source.runs(here) == target.runs(there) for here, there in places)

    def __str__(self) -> str:
        count, itemsize = self.collectives, self.source.dtype.itemsize
        lines = [
            f"{self.source!r} on {self.pair.source!r} -> {self.target!r} on {self.pair.target!r}   "
            f"{count} collective{'' if count == 1 else 's'}, {bytes_text(self.received)} received by a rank"
        ]
        for step in self.reduction.steps:
            over = f"over {', '.join(self.pair.source.names[axis] for axis in step.axes)}" if step.axes else "locally"
            after = spec_text(step.after, self.source.dtype, self.pair.source.names)
            lines.append(_line(len(lines), step.label(), over, received_exactly(step, itemsize), after))
        label = ("exchange" if self.exchanges else "slice") + (f" ({self.op})" if self.op else "")
        over = f"over {sum(map(len, self.pair.ranks))} ranks" if self.exchanges else "locally"
        after = repr(self.target) + (f"   in {self.rounds} rounds" if self.rounds > 1 else "")
        lines.append(_line(len(lines), label, over, max(self.received_by.values(), default=0), after))
        return "\n".join(lines)


def _line(number: int, label: str, over: str, received: float, after: str) -> str:
    return f"  {number}. {label:<20} {over:<16} {bytes_text(received):>9}   {after}"


_CHANGES: WorldCache[tuple[DTensorSpec, DTensorSpec], MeshChange] = WorldCache("changes of mesh", 4 << 20)


def plan_mesh_change(source: DTensorSpec, target: DTensorSpec) -> MeshChange:
    """Return the steps that move a tensor from one mesh to another."""
    cache = _CHANGES.of(source.mesh_info.runtime)
    found = cache.get((source, target))
    if found is None:
        found = cache[source, target] = _make(source, target)
    return found


def _make(source: DTensorSpec, target: DTensorSpec) -> MeshChange:
    if source.mesh_info.runtime is not target.mesh_info.runtime:
        raise MeshError(
            f"cannot move {source!r} from {source.mesh_info!r} to {target.mesh_info!r}, a mesh of another world",
            "use meshes that were made in this world",
        )
    pair = mesh_pair(source.mesh_info, target.mesh_info)
    if pair.merges:
        raise MeshError(
            f"cannot move {source!r} from {source.mesh_info!r}, a submesh with {source.mesh_info.instances.shape[0]} "
            f"parallel instances, to {target.mesh_info!r}: each instance has a tensor of its own",
            "make one tensor of them on the mesh that the submesh was sliced from, e.g. "
            "DTensor.from_local(x.to_local(), mesh, [Replicate(), *x.placements])",
        )
    for axis_op in dict(source.layout.partial).values():
        check_reducible(source.dtype, axis_op)
    candidates = [*_reduced_by_receivers(source, target, pair), *_reduced_before(source, target, pair)]
    return min(candidates, key=lambda change: change.seconds)


def needing_axes(target: DTensorSpec) -> tuple[int, ...]:
    """Return the Partial axes of a target along which only the first rank gets the value, others the identity."""
    return tuple(axis for axis, op in target.layout.partial if op in ("sum", "product"))


def _reduced_before(source: DTensorSpec, target: DTensorSpec, pair: MeshPair) -> Iterator[MeshChange]:
    mesh_info, itemsize = source.mesh_info, source.dtype.itemsize
    # Ranks outside the mesh do not know its groups of several axes, and must choose the same plan.
    groups: frozenset[Axes] = frozenset((axis,) for axis in range(len(mesh_info.sizes)))
    if mesh_info.adopted and mesh_info.covers_world():
        groups = frozenset(mesh_info.groups)
    for middle in _without_partial(source.layout):
        try:
            plan = make_plan(source.layout, middle, itemsize, links_of(mesh_info), groups)
        except CommunicationError:
            continue
        key = RouteKey(middle, target.layout.without_partial(), (), needing_axes(target))
        yield _priced(source, target, pair, plan, (route_of(pair, key),), "", 1)


def _without_partial(layout: Layout) -> list[Layout]:
    """Return the layouts to try as results of a reduction: replicated over the Partial axes, or a dim sharded."""
    replicated = layout.without_partial()
    axes = tuple(axis for axis, _ in layout.partial)
    if not axes:
        return [replicated]
    found = [replicated]
    for dim, factors in enumerate(layout.dims):
        last = factors[-1]
        if last.size >= 2:
            finer = (*factors[:-1], Factor(last.size, last.axes + axes))
            found.append(Layout.make(layout.mesh_sizes, (*layout.dims[:dim], finer, *layout.dims[dim + 1 :])))
    return found


def _reduced_by_receivers(source: DTensorSpec, target: DTensorSpec, pair: MeshPair) -> Iterator[MeshChange]:
    """Yield the change in which receivers reduce the operands, if one op reduces all and they fit into `staging`."""
    partial: PartialAxes = source.layout.partial
    ops = {op for _, op in partial}
    if not partial or (len(ops) > 1 and ops != {"sum", "avg"}):
        return
    sizes, layout = source.mesh_info.sizes, source.layout.without_partial()
    axes = [axis for axis, _ in partial]
    operands = itertools.product(*(range(sizes[axis]) for axis in axes))
    goal, needing = target.layout.without_partial(), needing_axes(target)
    keys = (RouteKey(layout, goal, tuple(zip(axes, at, strict=True)), needing) for at in operands)
    routes = tuple(route_of(pair, key) for key in keys)
    held = goal.max_local_numel() * len(routes)
    if (staged(routes) + held) * source.dtype.itemsize > cost_model().staging:
        return
    op = "sum" if "sum" in ops or "avg" in ops else ops.pop()
    divisor = math.prod(sizes[axis] for axis, its_op in partial if its_op == "avg")
    unreduced = Plan(source.layout, source.layout, (), 0.0)
    yield _priced(source, target, pair, unreduced, routes, op, divisor)


def _priced(
    source: DTensorSpec,
    target: DTensorSpec,
    pair: MeshPair,
    reduction: Plan,
    routes: tuple[Route, ...],
    op: str,
    divisor: int,
) -> MeshChange:
    itemsize = source.dtype.itemsize
    rounds = rounds_of(staged(routes), cost_model().staging // itemsize, max(map(len, pair.ranks)) - 1)
    seconds = reduction.seconds + exchange_seconds(pair, routes, itemsize, rounds)
    if op:  # the operands are put together and reduced
        seconds += 2 * links_of(pair.source).pack * target.layout.max_local_numel() * len(routes) * itemsize
    return MeshChange(source, target, pair, reduction, routes, op, divisor, rounds, seconds)


def exchange_seconds(pair: MeshPair, routes: Sequence[Route], itemsize: int, rounds: int) -> float:
    """Return the modelled seconds of an exchange, for the rank that sends or receives most."""
    sent, received = (_most(route.sent for route in routes), _most(route.received for route in routes))
    if not received:
        return LOCAL_STEP
    rates, nbytes = cost_model().rates_between(pair.source, pair.target), max(sent, received) * itemsize
    latency = rates.seconds((0,), max(map(len, pair.ranks)) - 1, 0.0)
    return rounds * latency + nbytes / rates.bandwidth[0] + links_of(pair.source).pack * nbytes + 2 * LOCAL_STEP


def _most(counts: Iterable[dict[int, int]]) -> int:
    totals: dict[int, int] = {}
    for by_rank in counts:
        for rank, count in by_rank.items():
            totals[rank] = totals.get(rank, 0) + count
    return max(totals.values(), default=0)
