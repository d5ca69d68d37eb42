"""A quick estimate of what a redistribution costs, without searching for its plan.

It prices the one-shot way: reductions that must be done, then one exchange of all that is lacking. The propagator
compares hundreds of choices by it; the planner then finds the actual steps, which cost the same or less.
"""

from __future__ import annotations

import math
from functools import lru_cache

from ..sharding.layout import Layout
from .cost import Links
from .states import DistState, common_slots, held, lacking, product, talking_axes

LOCAL_STEP = 1e-6  # seconds: slicing is not quite free, so what needs none of it wins


@lru_cache(maxsize=65536)
def estimate(source: Layout, target: Layout, itemsize: int, links: Links) -> float:
    """Seconds to bring a tensor from one layout to another, about."""
    if source is target:
        return 0.0
    mesh_sizes = source.mesh_sizes
    nbytes = math.prod(source.shape) * itemsize
    slots = common_slots(source, target)
    if slots is None:
        axes = tuple({a for dim in source.dims for factor in dim for a in factor.axes})
        received = float(target.max_local_numel() * itemsize)
        return links.seconds(axes, product(mesh_sizes, axes) - 1, received) if axes else LOCAL_STEP
    state, goal = slots.source, slots.target
    seconds = 0.0
    kept = set(goal.partial)
    for op in dict.fromkeys(op for axis, op in state.partial if (axis, op) not in kept):
        axes = tuple(axis for axis, its_op in state.partial if its_op == op and (axis, op) not in kept)
        seconds += _reduction(mesh_sizes, state, goal, axes, nbytes, links)
        state = _reduced(state, goal, axes)
    if state.slots != goal.slots:
        received = lacking(mesh_sizes, state, goal) * nbytes
        talking = talking_axes(state, goal)
        seconds += LOCAL_STEP
        if received > 0 and talking:
            seconds += links.seconds(talking, product(mesh_sizes, talking) - 1, received)
    return seconds + (LOCAL_STEP if kept - set(source.partial) else 0.0)


def _reduction(
    mesh_sizes: tuple[int, ...], state: DistState, goal: DistState, axes: tuple[int, ...], nbytes: int, links: Links
) -> float:
    """One collective: a reduce-scatter where the goal is cut by these axes, else an all-reduce, twice the bytes."""
    peers = product(mesh_sizes, axes)
    part = held(mesh_sizes, state) * nbytes * (peers - 1) / peers
    scattered = all(any(axis in cuts for cuts in goal.slots) for axis in axes)
    return links.seconds(axes, peers - 1, part if scattered else 2 * part)


def _reduced(state: DistState, goal: DistState, axes: tuple[int, ...]) -> DistState:
    """The state after reducing, scattered onto the goal's slots where that adds to what they are cut by."""
    slots = list(state.slots)
    for i, wanted in enumerate(goal.slots):
        while len(slots[i]) < len(wanted) and wanted[: len(slots[i])] == slots[i] and wanted[len(slots[i])] in axes:
            slots[i] = wanted[: len(slots[i]) + 1]
    return DistState(tuple(slots), tuple(entry for entry in state.partial if entry[0] not in axes))
