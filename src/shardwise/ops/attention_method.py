"""Choose between a ring and an all-to-all by heads for attention over a sharded sequence, by the cost model."""

from __future__ import annotations

import math
from typing import NamedTuple

from ..comm.cost import links_of
from ..comm.estimate import estimate
from ..sharding.layout import Factor, Layout, dim_axes, divides_evenly
from ..sharding.runtime import WorldCache
from ..sharding.spec import DTensorSpec
from .sequence_options import Method, sequence_mode

HEADS, SEQUENCE = 1, 2
"""The dims of heads and of positions."""


class MethodChoice(NamedTuple):
    """The cheaper method for attention of some specs, and the modelled seconds of each method."""

    method: Method
    seconds: dict[str, float]

    def __str__(self) -> str:
        prices = ", ".join(f"{name} {seconds * 1e3:.3g} ms" for name, seconds in self.seconds.items())
        return f"{self.method} ({prices})"


_CHOICES: WorldCache[tuple[DTensorSpec, DTensorSpec, DTensorSpec, bool], MethodChoice] = WorldCache(
    "methods of attention", max_bytes=1 << 18
)


def choose_method(query: DTensorSpec, key: DTensorSpec, value: DTensorSpec, training: bool = True) -> MethodChoice:
    """Return the cheaper of a ring and an all-to-all by heads, for tensors `[batch, heads, positions, features]`.

    For training the costs include backward, where a ring moves keys, values and their gradients, and the all-to-all
    moves four tensors again.

    >>> print(choose_method(q.spec, k.spec, v.spec))
    heads (ring ... ms, heads ... ms)
    """
    call = query, key, value, training
    return _CHOICES.entry(key.mesh_info.runtime, call, lambda: _choose_method(*call))


def _choose_method(query: DTensorSpec, key: DTensorSpec, value: DTensorSpec, training: bool) -> MethodChoice:
    axes, links = sequence_axes(key, value), links_of(key.mesh_info)
    if not axes:
        return MethodChoice("ring", {"ring": 0.0})
    ranks = math.prod(key.mesh_info.sizes[axis] for axis in axes)
    sizes = [(spec.layout.max_local_numel(), spec.tensor_meta.dtype.itemsize) for spec in (key, value)]
    block = links.seconds(axes, 1, sum(count * itemsize for count, itemsize in sizes))
    gradients = links.seconds(axes, 1, sum(count * max(itemsize, 4) for count, itemsize in sizes))  # in float32
    seconds = {"ring": (ranks - 1) * (2 * block + gradients if training else block)}
    targets = [over_heads(spec.layout, axes) for spec in (query, key, value)]
    if targets[1] is not None and targets[0] is not None and targets[2] is not None:
        moved = [(query, targets[0]), (key, targets[1]), (value, targets[2]), (query, targets[0])]
        exchanges = [estimate(spec.layout, to, spec.tensor_meta.dtype.itemsize, links) for spec, to in moved]
        seconds["heads"] = (2 if training else 1) * sum(exchanges)
    best: Method = "heads" if seconds.get("heads", math.inf) < seconds["ring"] else "ring"
    return MethodChoice(best, seconds)


def sequence_axes(key: DTensorSpec, value: DTensorSpec) -> tuple[int, ...]:
    """Return the mesh axes over which keys, or values, are sharded by position."""
    return dim_axes(key.layout.dims[SEQUENCE]) or dim_axes(value.layout.dims[SEQUENCE])


def zigzag_ranks(query: DTensorSpec, key: DTensorSpec, value: DTensorSpec) -> int:
    """Return the number of ranks that a sequence in head-tail order was arranged for.

    Return 0 if the sequence is in its original order.
    """
    sharding = sequence_axes(key, value) or dim_axes(query.layout.dims[SEQUENCE])
    return math.prod(key.mesh_info.sizes[axis] for axis in sharding) if sequence_mode().zigzag else 0


def over_heads(layout: Layout, axes: tuple[int, ...]) -> Layout | None:
    """Return the layout with the heads sharded over these axes instead of the positions.

    Return None if they do not divide evenly.
    """
    heads, positions = layout.dims[HEADS], layout.dims[SEQUENCE]
    elsewhere = {axis for dim in (0, HEADS, 3) for axis in dim_axes(layout.dims[dim])} & set(axes)
    if len(heads) > 1 or len(positions) > 1 or layout.partial or elsewhere or set(dim_axes(positions)) - set(axes):
        return None
    sharded = Factor(heads[0].size, (*heads[0].axes, *axes))
    if not divides_evenly(layout.mesh_sizes, sharded):
        return None
    dims = list(layout.dims)
    dims[HEADS], dims[SEQUENCE] = (sharded,), (Factor(positions[0].size, ()),)
    return Layout.make(layout.mesh_sizes, dims)


def by_position(layout: Layout, axes: tuple[int, ...]) -> Layout:
    """Undo `over_heads`: return the layout with these axes sharding positions again, for results of each query."""
    dims = list(layout.dims)
    kept = tuple(axis for axis in dim_axes(dims[HEADS]) if axis not in axes)
    dims[HEADS] = (Factor(layout.shape[HEADS], kept),)
    dims[SEQUENCE] = (Factor(layout.shape[SEQUENCE], axes),)
    return Layout.make(layout.mesh_sizes, dims, layout.partial)
