"""Layouts: which elements of a tensor each rank holds, as pure arithmetic.

A tensor dim is a short tuple of factors, major to minor; a factor is an index space with the mesh axes that cut
it, major to minor. An axis cuts what the axes before it left, the way `torch.chunk` does, so the last ranks may
hold less than the others, or nothing. A dim's local index set is the product of its factors' ranges. This one form
covers plain sharding (one factor), several axes on one dim in any order (several axes in the factor), and
interleaved cuts (an uncut factor to the left of a cut one).

A mesh is here only the tuple of its axis sizes; a coordinate is a tuple with an index for each axis.

>>> layout = Layout.make((2, 2), ((Factor(6, (0, 1)),), (Factor(4, ()),)))
>>> layout.local_shape((1, 0)), layout.offset((1, 0))
((2, 4), (3, 0))
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple
from weakref import WeakValueDictionary

from ..errors import LayoutError
from .once import making
from .placement import InterleavedShard, Partial, Placement, Replicate, Shard, ShardOrder, ShardOrderEntry

Sizes = tuple[int, ...]
Coordinate = tuple[int, ...]
Run = tuple[int, int]


class Factor(NamedTuple):
    """An index space and the mesh axes that cut it, major to minor."""

    size: int
    axes: tuple[int, ...]


Dim = tuple[Factor, ...]
PartialAxes = tuple[tuple[int, str], ...]


class Layout:
    """The factors of every dim and the axes that hold operands of a reduction. Interned: equal means identical."""

    __slots__ = ("__weakref__", "dims", "mesh_sizes", "partial")
    _interned: ClassVar[WeakValueDictionary[Any, Layout]] = WeakValueDictionary()

    mesh_sizes: Sizes
    dims: tuple[Dim, ...]
    partial: PartialAxes

    @classmethod
    def make(cls, mesh_sizes: Sizes, dims: Sequence[Dim], partial: PartialAxes = ()) -> Layout:
        """The one layout with these factors, brought to canonical form."""
        key = (mesh_sizes, tuple(canonical(mesh_sizes, dim) for dim in dims), tuple(sorted(partial)))
        found = cls._interned.get(key)
        if found is None:
            found = object.__new__(cls)
            found.mesh_sizes, found.dims, found.partial = key
            with making:
                found = cls._interned.setdefault(key, found)
        return found

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return tuple(math.prod(factor.size for factor in dim) for dim in self.dims)

    def ranges(self, coordinate: Coordinate) -> tuple[tuple[Run, ...], ...]:
        """For each dim and factor, the `[start, stop)` that the rank at this coordinate holds."""
        return tuple(tuple(factor_range(self.mesh_sizes, factor, coordinate) for factor in dim) for dim in self.dims)

    def local_shape(self, coordinate: Coordinate) -> tuple[int, ...]:
        """The shape of the part that the rank at this coordinate holds."""
        return tuple(math.prod(stop - start for start, stop in dim) for dim in self.ranges(coordinate))

    def offset(self, coordinate: Coordinate) -> tuple[int, ...]:
        """For each dim the global index of the first element held (the end of the dim if nothing is held)."""
        result = []
        for dim, ranges in zip(self.dims, self.ranges(coordinate), strict=True):
            index = 0
            for factor, (start, _) in zip(dim, ranges, strict=True):
                index = index * factor.size + start
            empty = any(start == stop for start, stop in ranges)
            result.append(math.prod(factor.size for factor in dim) if empty else index)
        return tuple(result)

    def runs(self, coordinate: Coordinate) -> tuple[tuple[Run, ...], ...]:
        """For each dim the contiguous global `[start, stop)` runs held, in local order."""
        places = (tuple([coordinate[axis] for factor in dim for axis in factor.axes]) for dim in self.dims)
        return tuple([_runs_at(self.mesh_sizes, dim, place) for dim, place in zip(self.dims, places, strict=True)])

    def max_local_numel(self) -> int:
        """The most elements any rank holds."""
        return math.prod(largest_piece(self.mesh_sizes, factor) for dim in self.dims for factor in dim)

    def is_even(self) -> bool:
        """Whether every rank holds equally much."""
        return all(divides_evenly(self.mesh_sizes, factor) for dim in self.dims for factor in dim)

    def without_partial(self) -> Layout:
        """The same cuts, with every reduction done."""
        return Layout.make(self.mesh_sizes, self.dims) if self.partial else self

    def __repr__(self) -> str:
        dims = ", ".join(_dim_text(dim) for dim in self.dims)
        return f"Layout[{dims}]" + "".join(f" {op}({axis})" for axis, op in self.partial)


def _dim_text(dim: Dim) -> str:
    texts = [str(f.size) + ("@" + ",".join(map(str, f.axes)) if f.axes else "") for f in dim]
    return texts[0] if len(texts) == 1 else f"({' '.join(texts)})"


# ---- one factor ----------------------------------------------------------------------------------------------


def chunk_range(start: int, stop: int, pieces: int, index: int) -> Run:
    """Piece `index` of `[start, stop)` cut in `pieces` as `torch.chunk` does, with empty pieces at the end."""
    step = -(-(stop - start) // pieces)
    low = min(start + step * index, stop)
    return low, min(low + step, stop)


def factor_range(sizes: Sizes, factor: Factor, coordinate: Coordinate) -> Run:
    """The `[start, stop)` of a factor that the rank at this coordinate holds."""
    start, stop = 0, factor.size
    for axis in factor.axes:
        start, stop = chunk_range(start, stop, sizes[axis], coordinate[axis])
    return start, stop


def largest_piece(sizes: Sizes, factor: Factor) -> int:
    """The most that any rank holds of a factor."""
    size = factor.size
    for axis in factor.axes:
        size = -(-size // sizes[axis])
    return size


def pieces(sizes: Sizes, axes: Sequence[int]) -> int:
    """In how many pieces these axes cut."""
    return math.prod(sizes[axis] for axis in axes)


def divides_evenly(sizes: Sizes, factor: Factor) -> bool:
    """Whether every rank holds equally much of a factor."""
    return factor.size % pieces(sizes, factor.axes) == 0


@lru_cache(maxsize=65536)
def aligned(sizes: Sizes, major: int, minor: int, axes: tuple[int, ...]) -> bool:
    """Whether cutting `major * minor` by these axes is cutting `major` by them, on every rank."""
    if major % pieces(sizes, axes) == 0:
        return True
    for indices in itertools.product(*(range(sizes[axis]) for axis in axes)):
        whole, part = (0, major * minor), (0, major)
        for axis, index in zip(axes, indices, strict=True):
            whole = chunk_range(*whole, sizes[axis], index)
            part = chunk_range(*part, sizes[axis], index)
        size = (part[1] - part[0]) * minor
        if whole[1] - whole[0] != size or (size and whole[0] != part[0] * minor):
            return False
    return True


def split_factor(sizes: Sizes, factor: Factor, major: int) -> tuple[Factor, Factor] | None:
    """The factor as `major` times the rest, if its cuts fall on the boundaries of that product on every rank."""
    if major == 0 or factor.size % major:
        return None
    minor = factor.size // major
    for count in range(len(factor.axes), -1, -1):
        outer, inner = factor.axes[:count], factor.axes[count:]
        if aligned(sizes, major, minor, outer) and (not inner or largest_piece(sizes, Factor(major, outer)) <= 1):
            return Factor(major, outer), Factor(minor, inner)
    return None


# ---- one dim -------------------------------------------------------------------------------------------------


@lru_cache(maxsize=65536)
def canonical(sizes: Sizes, dim: Dim) -> Dim:
    """The same index sets with neighbouring factors merged wherever their cuts allow it."""
    merged: list[Factor] = []
    for factor in dim:
        if factor.size == 1 and not factor.axes:
            continue
        if merged:
            major = merged[-1]
            mergeable = not factor.axes or largest_piece(sizes, major) <= 1
            if mergeable and aligned(sizes, major.size, factor.size, major.axes):
                merged[-1] = Factor(major.size * factor.size, major.axes + factor.axes)
                continue
        merged.append(Factor(*factor))
    return tuple(merged) or (Factor(1, ()),)


def dim_runs(dim: Dim, ranges: Sequence[Run]) -> tuple[Run, ...]:
    """The contiguous global runs of one dim, given the range held of each of its factors."""
    if any(start == stop for start, stop in ranges):
        return ()
    spans: list[Run] = [(0, 1)]
    for factor, (start, stop) in zip(dim, ranges, strict=True):
        size = factor.size
        if (start, stop) == (0, size):
            spans = [(low * size, high * size) for low, high in spans]
        else:
            spans = [(i * size + start, i * size + stop) for low, high in spans for i in range(low, high)]
    return tuple(spans)


@lru_cache(maxsize=65536)
def _runs_at(sizes: Sizes, dim: Dim, place: tuple[int, ...]) -> tuple[Run, ...]:
    """The runs of one dim for a rank with these indices on the axes that cut it; many ranks share them."""
    indices = iter(place)
    ranges = []
    for factor in dim:
        start, stop = 0, factor.size
        for axis in factor.axes:
            start, stop = chunk_range(start, stop, sizes[axis], next(indices))
        ranges.append((start, stop))
    return dim_runs(dim, ranges)


def cut(sizes: Sizes, dim: Dim, axis: int, blocks: int = 1) -> Dim:
    """The dim with one more axis cutting it: each of `blocks` equal blocks of what a rank holds is chunked."""
    if blocks == 1:
        return _cut_outermost(sizes, dim, axis)
    passed = 1
    for i, factor in enumerate(dim):
        if passed == blocks:
            return dim[:i] + _cut_outermost(sizes, dim[i:], axis)
        if not divides_evenly(sizes, factor):
            raise LayoutError("an interleaved cut inside an uneven one", "interleave first or use an even size")
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
                *_cut_outermost(sizes, (minor, *dim[i + 1 :]), axis),
            )
        else:
            break
    if passed == blocks:
        return (*dim, Factor(1, (axis,)))
    held = math.prod(largest_piece(sizes, factor) for factor in dim)
    raise LayoutError(f"{blocks} blocks of a dim of which a rank holds {held}", "the blocks must divide that size")


def _cut_outermost(sizes: Sizes, dim: Dim, axis: int) -> Dim:
    """Chunk what a rank holds of the dim: cuts the first factor of which a rank holds more than one index."""
    i = next((i for i, f in enumerate(dim) if largest_piece(sizes, f) != 1), len(dim) - 1)
    factor = dim[i]
    extended = Factor(factor.size, (*factor.axes, axis))
    rest = math.prod(largest_piece(sizes, f) for f in dim[i + 1 :])
    if rest != 1 and not divides_evenly(sizes, extended):
        raise LayoutError(
            f"a cut in {sizes[axis]} that falls inside a block of {_dim_text(dim)}",
            "use a size that these axes divide evenly",
        )
    return (*dim[:i], extended, *dim[i + 1 :])


# ---- placements to layout and back -----------------------------------------------------------------------------


def from_placements(
    sizes: Sizes, shape: Sequence[int], placements: Sequence[Placement], order: ShardOrder = ()
) -> Layout:
    """The layout that these placements mean. Axes cut from left to right unless `order` says otherwise."""
    dims: list[Dim] = [(Factor(size, ()),) for size in shape]
    partial: list[tuple[int, str]] = []
    for axis in cutting_sequence(len(sizes), order):
        placement = placements[axis]
        if isinstance(placement, Partial):
            partial.append((axis, placement.reduce_op))
        elif isinstance(placement, Shard):
            blocks = placement.blocks if isinstance(placement, InterleavedShard) else 1
            dims[placement.dim] = cut(sizes, dims[placement.dim], axis, blocks)
    return Layout.make(sizes, dims, tuple(partial))


def cutting_sequence(mesh_ndim: int, order: ShardOrder) -> list[int]:
    """All axes, in an order in which each dim's axes come major to minor."""
    ordered = [axis for entry in order for axis in entry.mesh_dims]
    return [axis for axis in range(mesh_ndim) if axis not in ordered] + ordered


def default_order(placements: Sequence[Placement]) -> ShardOrder:
    """The order meant where none is given: every dim is cut by its axes from left to right."""
    by_dim: dict[int, list[int]] = {}
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            by_dim.setdefault(placement.dim, []).append(axis)
    return tuple(ShardOrderEntry(dim, tuple(by_dim[dim])) for dim in sorted(by_dim))


@lru_cache(maxsize=65536)
def to_placements(layout: Layout) -> tuple[tuple[Placement, ...], ShardOrder] | None:
    """The placements and order that mean this layout, or None where no placement list can say it."""
    placements: list[Placement] = [Replicate()] * len(layout.mesh_sizes)
    order = []
    for axis, op in layout.partial:
        placements[axis] = Partial(op)
    for d, dim in enumerate(layout.dims):
        cuts: list[int] = []
        # From the minor factor to the major one: then `blocks` counts factors that are not cut yet.
        for i in range(len(dim) - 1, -1, -1):
            blocks = math.prod(factor.size for factor in dim[:i])
            for axis in dim[i].axes:
                placements[axis] = Shard(d) if blocks == 1 else InterleavedShard(d, blocks)
                cuts.append(axis)
        if cuts:
            order.append(ShardOrderEntry(d, tuple(cuts)))
    try:
        rebuilt = from_placements(layout.mesh_sizes, layout.shape, placements, tuple(order))
    except LayoutError:
        return None
    return (tuple(placements), tuple(order)) if rebuilt is layout else None
