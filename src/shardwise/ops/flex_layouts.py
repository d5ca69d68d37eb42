"""How `flex_attention` of DTensors is sharded: a rank computes some queries, with all the keys and values they may see.

Each mesh axis shards the batch, the heads or the positions of queries, or nothing. Keys and values follow the queries
in batch and heads, and are gathered along their positions. Their gradients are then sums over the axes that shard
queries alone.

>>> layouts = flex_layouts(q.spec, k.spec, v.spec)     # all f32[2, 8, 4096@cp, 64]
>>> layouts.key
Layout[2, 8, 4096, 64]
>>> layouts.key_gradient
Layout[2, 8, 4096, 64] sum(0)
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ..comm.cost import Links, links_of
from ..comm.estimate import estimate
from ..sharding.layout import Dim, Factor, Layout, dim_axes, divides_evenly
from ..sharding.runtime import WorldCache
from ..sharding.spec import DTensorSpec
from .attention_method import HEADS, SEQUENCE, MethodChoice, over_heads

BATCH = 0
_QUERY_DIMS = BATCH, HEADS, SEQUENCE


class FlexLayouts(NamedTuple):
    """The layouts in which queries, keys and values are needed, and those of what is computed from them."""

    query: Layout
    key: Layout
    value: Layout
    key_gradient: Layout
    value_gradient: Layout
    output: Layout
    logsumexp: Layout

    @property
    def split_axes(self) -> tuple[int, ...]:
        """The mesh axes over which the work is split."""
        return tuple(axis for dim in _QUERY_DIMS for axis in dim_axes(self.query.dims[dim]))


_LAYOUTS: WorldCache[tuple[DTensorSpec, DTensorSpec, DTensorSpec], FlexLayouts] = WorldCache(
    "layouts of flex attention", max_bytes=1 << 18
)


def flex_layouts(query: DTensorSpec, key: DTensorSpec, value: DTensorSpec) -> FlexLayouts:
    """Return the layouts of a call with tensors `[batch, heads, positions, features]`."""
    specs = query, key, value
    return _LAYOUTS.entry(query.mesh_info.runtime, specs, lambda: _flex_layouts(*(spec.layout for spec in specs)))


def _flex_layouts(query: Layout, key: Layout, value: Layout) -> FlexLayouts:
    wanted = _query_layout(query, key, value)
    key_wanted, value_wanted = (_key_layout(layout, wanted) for layout in (key, value))
    sizes, dims = wanted.mesh_sizes, wanted.dims
    return FlexLayouts(
        query=wanted,
        key=key_wanted,
        value=value_wanted,
        key_gradient=_gradient(key_wanted, wanted),
        value_gradient=_gradient(value_wanted, wanted),
        output=Layout.make(sizes, (*dims[:3], (Factor(value.shape[3], ()),))),
        logsumexp=Layout.make(sizes, dims[:3]),
    )


def _query_layout(query: Layout, key: Layout, value: Layout) -> Layout:
    """Return the layout of queries: features replicated, sharded also over axes that shard only keys or values."""
    dims = [*query.dims[:3], (Factor(query.shape[3], ()),)]
    used = {axis for dim in dims for axis in dim_axes(dim)}
    for other in (key, value):
        for dim in _QUERY_DIMS:
            for axis in dim_axes(other.dims[dim]):
                if axis not in used and len(dims[dim]) == 1 and other.shape[dim] > 1:
                    (factor,) = dims[dim]
                    dims[dim] = (Factor(factor.size, (*factor.axes, axis)),)
                    used.add(axis)
    return Layout.make(query.mesh_sizes, dims)


def _key_layout(layout: Layout, query: Layout) -> Layout:
    dims: list[Dim] = [(Factor(size, ()),) for size in layout.shape]
    if layout.shape[BATCH] == query.shape[BATCH]:
        dims[BATCH] = query.dims[BATCH]
    if layout.shape[HEADS] == query.shape[HEADS]:
        dims[HEADS] = query.dims[HEADS]
    else:  # queries that share a head of keys are on the rank of that head, if the ranks divide the heads of keys
        shared = Factor(layout.shape[HEADS], dim_axes(query.dims[HEADS]))
        if len(query.dims[HEADS]) == 1 and divides_evenly(query.mesh_sizes, shared):
            dims[HEADS] = (shared,)
    return Layout.make(layout.mesh_sizes, dims)


def _gradient(layout: Layout, query: Layout) -> Layout:
    """Return the layout of the local gradients of keys: sums over the axes that shard the queries, but not the keys."""
    own = {axis for dim in layout.dims for axis in dim_axes(dim)}
    split = sorted({axis for dim in _QUERY_DIMS for axis in dim_axes(query.dims[dim])} - own)
    return Layout.make(layout.mesh_sizes, layout.dims, tuple((axis, "sum") for axis in split))


def positions_axes(query: DTensorSpec, key: DTensorSpec, value: DTensorSpec) -> tuple[int, ...]:
    """Return the mesh axes that shard queries by position, in the layouts of a call."""
    return dim_axes(flex_layouts(query, key, value).query.dims[SEQUENCE])


_CHOICES: WorldCache[tuple[DTensorSpec, DTensorSpec, DTensorSpec, bool], MethodChoice] = WorldCache(
    "methods of flex attention", max_bytes=1 << 18
)


def choose_flex_method(query: DTensorSpec, key: DTensorSpec, value: DTensorSpec, training: bool = True) -> MethodChoice:
    """Return the cheaper of gathered keys and values, and an all-to-all by heads.

    >>> print(choose_flex_method(q.spec, k.spec, v.spec))
    heads (gather 3.27 ms, heads 1.66 ms)
    """
    call = query, key, value, training
    return _CHOICES.entry(query.mesh_info.runtime, call, lambda: _choose(*call))


def _choose(query: DTensorSpec, key: DTensorSpec, value: DTensorSpec, training: bool) -> MethodChoice:
    links, layouts = links_of(query.mesh_info), flex_layouts(query, key, value)
    seconds = {"gather": _gather_seconds(query, key, value, layouts, training, links)}
    axes = positions_axes(query, key, value)
    targets = [over_heads(spec.layout, axes) for spec in (query, key, value)] if axes else []
    if targets and all(targets):
        moved = [*zip((query, key, value), targets, strict=True), (query, targets[0])]  # the output as the queries
        exchanges = [estimate(spec.layout, to, spec.dtype.itemsize, links) for spec, to in moved if to is not None]
        seconds["heads"] = (2 if training else 1) * sum(exchanges)
    return MethodChoice("heads" if seconds.get("heads", math.inf) < seconds["gather"] else "gather", seconds)


def _gather_seconds(
    query: DTensorSpec, key: DTensorSpec, value: DTensorSpec, layouts: FlexLayouts, training: bool, links: Links
) -> float:
    pairs = [(query, layouts.query), (key, layouts.key), (value, layouts.value)]
    seconds = sum(estimate(spec.layout, to, spec.dtype.itemsize, links) for spec, to in pairs)
    if training:
        back = [(layouts.key_gradient, key), (layouts.value_gradient, value)]
        seconds += sum(
            estimate(source, spec.layout.without_partial(), spec.dtype.itemsize, links) for source, spec in back
        )
    return seconds
