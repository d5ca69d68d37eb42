"""A quick estimate of what a redistribution costs, without searching for its plan.

The estimate is the price of the direct plan: the necessary reductions, then one exchange of everything that is missing.
The propagator compares hundreds of choices by it. The planner then searches the actual steps of the best one.
"""

from __future__ import annotations

from functools import lru_cache

from ..sharding.layout import Layout, dim_axes
from .cost import LOCAL_STEP, Links
from .states import DistState, axes_to_exchange_over, common_slots, held, lacking, product


@lru_cache(maxsize=16384)
def estimate(source: Layout, target: Layout, itemsize: int, links: Links) -> float:
    """Return about how many seconds it takes to redistribute a tensor from one layout to another."""
    if source is target:
        return 0.0
    mesh_sizes = source.mesh_sizes
    nbytes = source.numel() * itemsize
    slots = common_slots(source, target)
    if slots is None:
        axes = tuple(sorted(axis for dim in source.dims for axis in dim_axes(dim)))
        received = float(target.max_local_numel() * itemsize)
        return links.p2p.seconds(axes, product(mesh_sizes, axes) - 1, received) if axes else LOCAL_STEP
    state, goal = slots.source, slots.target
    seconds = 0.0
    for axes in _reduced_together(state, goal) if state.partial else ():
        seconds += _reduction(mesh_sizes, state, goal, axes, nbytes, links)
        state = _reduced(state, goal, axes)
    if state.slots != goal.slots:
        received = lacking(mesh_sizes, state, goal) * nbytes
        exchanged = axes_to_exchange_over(state, goal)
        seconds += LOCAL_STEP
        if received > 0 and exchanged:
            gathers = all(have[: len(want)] == want for have, want in zip(state.slots, goal.slots, strict=True))
            rates = links.ring if gathers else links.p2p
            seconds += rates.seconds(exchanged, product(mesh_sizes, exchanged) - 1, received)
    becomes_partial = goal.partial and not set(goal.partial) <= set(source.partial)
    return seconds + (LOCAL_STEP if becomes_partial else 0.0)


def _reduced_together(state: DistState, goal: DistState) -> list[tuple[int, ...]]:
    """Return the sets of axes that are reduced together: those with the same op, averages with sums.

    A dict, not sets: every rank must sum the prices in the same order.
    """
    axes: dict[str, tuple[int, ...]] = {}
    for axis, op in state.partial:
        if (axis, op) not in goal.partial:
            family = "sum" if op == "avg" else op
            axes[family] = (*axes.get(family, ()), axis)
    return list(axes.values())


def _reduction(
    mesh_sizes: tuple[int, ...], state: DistState, goal: DistState, axes: tuple[int, ...], nbytes: int, links: Links
) -> float:
    """Return the seconds of a reduce-scatter if the goal is sharded over these axes, else of an all-reduce."""
    peers = product(mesh_sizes, axes)
    received = held(mesh_sizes, state) * nbytes * (peers - 1) / peers
    scattered = all(any(axis in slot_axes for slot_axes in goal.slots) for axis in axes)
    return links.seconds(axes, peers - 1, received if scattered else 2 * received)


def _reduced(state: DistState, goal: DistState, axes: tuple[int, ...]) -> DistState:
    """Return the state after a reduction over these axes, which shard the slots of the goal where they come next."""
    slots = list(state.slots)
    for i, wanted in enumerate(goal.slots):
        while len(slots[i]) < len(wanted) and wanted[: len(slots[i])] == slots[i] and wanted[len(slots[i])] in axes:
            slots[i] = wanted[: len(slots[i]) + 1]
    return DistState(tuple(slots), tuple(entry for entry in state.partial if entry[0] not in axes))
