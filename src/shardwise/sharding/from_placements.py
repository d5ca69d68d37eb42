"""Placements to layouts, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from ..errors import LayoutError
from .layout import Dim, Factor, Layout, Sizes, dim_text, divides_evenly, largest_piece, pieces, plain_dim
from .placement import (
    AnyShard,
    InterleavedShard,
    OrderedShard,
    Partial,
    Placement,
    Replicate,
    Shard,
    ShardOrder,
    ShardOrderEntry,
)


def shard_dim(sizes: Sizes, dim: Dim, axis: int, blocks: int = 1) -> Dim:
    """Return the dim sharded over one more axis: each of `blocks` equal blocks of a local shard is chunked."""
    if blocks == 1:
        return _shard_outermost(sizes, dim, axis)
    passed = 1
    for i, factor in enumerate(dim):
        if passed == blocks:
            return dim[:i] + _shard_outermost(sizes, dim[i:], axis)
        if not divides_evenly(sizes, factor):
            raise LayoutError(
                f"{blocks} interleaved blocks inside uneven shards of a dim of size {math.prod(f.size for f in dim)}",
                "list the interleaved axis first in the shard order, or use a size that the other axes divide",
            )
        pieces_before = pieces(sizes, factor.axes)
        held = factor.size // pieces_before
        if held and blocks % (passed * held) == 0:
            passed *= held
        elif (passed * held) % blocks == 0:
            outer = blocks // passed
            minor = Factor(held // outer, ())
            return (
                *dim[:i],
                Factor(pieces_before * outer, factor.axes),
                *_shard_outermost(sizes, (minor, *dim[i + 1 :]), axis),
            )
        else:
            break
    if passed == blocks:
        return (*dim, Factor(1, (axis,)))
    held = math.prod(largest_piece(sizes, factor) for factor in dim)
    raise LayoutError(f"{blocks} blocks of a local size of {held}", "use a number of blocks that divides it")


def _shard_outermost(sizes: Sizes, dim: Dim, axis: int) -> Dim:
    """Return the dim with its local shard chunked over one more axis.

    The axis shards the first factor that has more than one local index.
    """
    i = next((i for i, f in enumerate(dim) if largest_piece(sizes, f) != 1), len(dim) - 1)
    factor = dim[i]
    if len(dim) == 1:
        return plain_dim(factor.size, (*factor.axes, axis))
    extended = Factor(factor.size, (*factor.axes, axis))
    rest = math.prod(largest_piece(sizes, f) for f in dim[i + 1 :])
    if rest != 1 and not divides_evenly(sizes, extended):
        raise LayoutError(
            f"{sizes[axis]} shards of {dim_text(dim)}, whose boundaries fall inside a block",
            "use a size that these axes divide evenly",
        )
    return (*dim[:i], extended, *dim[i + 1 :])


def from_placements(
    sizes: Sizes, shape: Sequence[int], placements: Sequence[Placement], order: ShardOrder = ()
) -> Layout:
    """Return the layout of these placements. Axes shard from left to right unless `order` gives another order."""
    dims: list[Dim] = [plain_dim(size, ()) for size in shape]
    partial: list[tuple[int, str]] = []
    for axis in sharding_sequence(len(sizes), order):
        placement = placements[axis]
        if isinstance(placement, Partial):
            partial.append((axis, placement.reduce_op))
        elif isinstance(placement, AnyShard):
            blocks = placement.blocks if isinstance(placement, InterleavedShard) else 1
            dims[placement.dim] = shard_dim(sizes, dims[placement.dim], axis, blocks)
    return Layout.make(sizes, dims, tuple(partial))


def resolve_placements(
    sizes: Sizes, shape: Sequence[int], placements: tuple[Placement, ...], order: ShardOrder
) -> tuple[Layout, tuple[Placement, ...], ShardOrder]:
    """Return the layout of these placements, and placements and a shard order that describe it.

    An axis interleaved in as many blocks as the axes to its right make shards is read as one that shards inside these
    shards, where the blocks have unequal sizes: `fully_shard` writes such placements for tensor-parallel parameters.

    >>> resolve_placements((2, 2), (15,), (InterleavedShard(0, 2), Shard(0)), order)
    (Layout(15@(1, 0)), (Shard(dim=0), Shard(dim=0)), (ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0)),))
    """
    try:
        return from_placements(sizes, shape, placements, order), placements, order
    except LayoutError:
        nested = _nested_order(sizes, placements) if order == default_order(placements) else None
        if nested is None:
            raise
        plain = tuple(Shard(p.dim) if isinstance(p, InterleavedShard) else p for p in placements)
        return from_placements(sizes, shape, plain, nested), plain, nested


def _nested_order(sizes: Sizes, placements: Sequence[Placement]) -> ShardOrder | None:
    """Return the shard order in which each interleaved axis shards inside its blocks, the shards of axes to its right.

    Return None if the blocks of some axis are not the shards of other axes.
    """
    order = []
    for entry in default_order(placements):
        axes: list[int] = []
        for axis in reversed(entry.mesh_dims):
            placement = placements[axis]
            blocks = placement.blocks if isinstance(placement, InterleavedShard) else 1
            outer = next((i for i in range(len(axes) + 1) if pieces(sizes, axes[:i]) == blocks), None)
            if outer is None:
                return None
            axes.insert(outer, axis)
        order.append(entry._replace(mesh_dims=tuple(axes)))
    return tuple(order)


def sharding_sequence(mesh_ndim: int, order: ShardOrder) -> list[int]:
    """Return all axes, ordered so that the axes of each dim are major to minor."""
    ordered = [axis for entry in order for axis in entry.mesh_dims]
    return [axis for axis in range(mesh_ndim) if axis not in ordered] + ordered


def default_order(placements: Sequence[Placement]) -> ShardOrder:
    """Return the shard order if none is given: the axes of each dim from left to right."""
    by_dim: dict[int, list[int]] = {}
    for axis, placement in enumerate(placements):
        if isinstance(placement, AnyShard):
            by_dim.setdefault(placement.dim, []).append(axis)
    return tuple(ShardOrderEntry(dim, tuple(by_dim[dim])) for dim in sorted(by_dim))


@lru_cache(maxsize=16384)
def to_placements(layout: Layout) -> tuple[tuple[Placement, ...], ShardOrder] | None:
    """Return the placements and shard order of this layout; None where no list of placements describes it."""
    replicate = Replicate()
    placements: list[Placement] = [replicate] * len(layout.mesh_sizes)
    order, uses = [], len(layout.partial)
    for axis, op in layout.partial:
        placements[axis] = Partial(op)
    for d, dim in enumerate(layout.dims):
        axes: list[int] = []
        # From the minor factor to the major one: then `blocks` counts factors that are not sharded yet.
        for i in range(len(dim) - 1, -1, -1):
            if not dim[i].axes:
                continue
            blocks = math.prod([factor.size for factor in dim[:i]])
            for axis in dim[i].axes:
                placements[axis] = Shard(d) if blocks == 1 else InterleavedShard(d, blocks)
                axes.append(axis)
        if axes:
            order.append(ShardOrderEntry(d, tuple(axes)))
            uses += len(axes)
    found = tuple(placements), tuple(order)
    if layout.unfactored and uses == len(placements) - placements.count(replicate):
        return found  # by construction: each dim is one factor, and no axis is used twice
    try:
        rebuilt = from_placements(layout.mesh_sizes, layout.shape, *found)
    except LayoutError:
        return None
    return found if rebuilt is layout else None


def with_order(placements: Sequence[Placement], order: ShardOrder) -> tuple[Placement, ...] | None:
    """Return these placements with `OrderedShard`s where the order is not the default; None if those interleave."""
    found = list(placements)
    for entry, usual in zip(order, default_order(placements), strict=True):
        if entry == usual:
            continue
        for place, axis in enumerate(entry.mesh_dims):
            if isinstance(placements[axis], InterleavedShard):
                return None
            found[axis] = OrderedShard(entry.tensor_dim, place)
    return tuple(found)


@lru_cache(maxsize=16384)
def in_mesh_order(layout: Layout) -> tuple[Placement, ...] | None:
    """Return the placements that give this layout when the axes shard from left to right; None if there are none.

    An axis that shards inside the pieces of an axis to its right shards each of these pieces: they are its blocks.

    >>> in_mesh_order(Layout.make((2, 2), [(Factor(8, (1, 0)),)]))
    (InterleavedShard(dim=0, blocks=2), Shard(dim=0))
    """
    sizes = layout.mesh_sizes
    placements: list[Placement] = [Replicate()] * len(sizes)
    for axis, op in layout.partial:
        placements[axis] = Partial(op)
    for d, dim in enumerate(layout.dims):
        for i, factor in enumerate(dim):
            for place, axis in enumerate(factor.axes):
                majors = [major for major in factor.axes[:place] if major > axis]
                blocks = math.prod(sizes[major] for major in majors)
                for outer in dim[:i]:
                    blocks *= outer.size // pieces(sizes, [other for other in outer.axes if other < axis])
                placements[axis] = Shard(d) if blocks <= 1 else InterleavedShard(d, blocks)
    try:
        rebuilt = from_placements(sizes, layout.shape, placements)
    except LayoutError:
        return None
    return tuple(placements) if rebuilt is layout else None
