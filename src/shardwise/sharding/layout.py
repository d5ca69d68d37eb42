"""Layouts: which elements of a tensor each rank holds, as pure arithmetic.

A tensor dim is a short tuple of factors, major to minor; a factor is an index space with the mesh axes that shard
it, major to minor. Each axis chunks what the axes before it left, the way `torch.chunk` does, so the last ranks may
hold less than the others, or nothing. A dim's local index set is the product of its factors' ranges. This one form
covers plain sharding (one factor), several axes on one dim in any order (several axes in the factor), and
interleaved sharding (an unsharded factor to the left of a sharded one).

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
from typing import ClassVar, NamedTuple
from weakref import WeakValueDictionary

from .._torch.symbols import hint, hinted, specialized
from .cache import cached_within
from .once import making

Sizes = tuple[int, ...]
Coordinate = tuple[int, ...]
Run = tuple[int, int]


class Factor(NamedTuple):
    """An index space and the mesh axes that shard it, major to minor."""

    size: int
    axes: tuple[int, ...]


Dim = tuple[Factor, ...]
PartialAxes = tuple[tuple[int, str], ...]


class Layout:
    """The factors of every dim, and the Partial axes with their reduce ops. Interned: equal means identical."""

    __slots__ = ("__weakref__", "_numel", "_shape", "_unfactored", "dims", "mesh_sizes", "partial")
    _interned: ClassVar[WeakValueDictionary[object, Layout]] = WeakValueDictionary()

    mesh_sizes: Sizes
    dims: tuple[Dim, ...]
    partial: PartialAxes
    _shape: tuple[int, ...]
    _numel: int
    _unfactored: bool

    @classmethod
    def make(cls, mesh_sizes: Sizes, dims: Sequence[Dim], partial: PartialAxes = ()) -> Layout:
        """Return the layout with these factors, in canonical form."""
        merged = [dim if len(dim) == 1 and type(dim[0]) is Factor else canonical(mesh_sizes, dim) for dim in dims]
        key = (mesh_sizes, tuple(merged), tuple(sorted(partial)) if partial else ())
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
        try:
            return self._shape
        except AttributeError:  # cached: propagation prices many layouts
            self._shape = tuple([dim[0].size if len(dim) == 1 else math.prod(f.size for f in dim) for dim in self.dims])
            return self._shape

    def numel(self) -> int:
        """Return the number of elements of the global tensor, with the hints of symbolic sizes."""
        try:
            return self._numel
        except AttributeError:
            self._numel = hint(math.prod(self.shape))
            return self._numel

    @property
    def unfactored(self) -> bool:
        """Whether every dim is one factor, as all placements but interleaved ones give."""
        try:
            return self._unfactored
        except AttributeError:
            self._unfactored = all(len(dim) == 1 for dim in self.dims)
            return self._unfactored

    def ranges(self, coordinate: Coordinate) -> tuple[tuple[Run, ...], ...]:
        """Return for each dim and factor the `[start, stop)` that the rank at this coordinate holds."""
        return tuple(tuple(factor_range(self.mesh_sizes, factor, coordinate) for factor in dim) for dim in self.dims)

    def local_shape(self, coordinate: Coordinate) -> tuple[int, ...]:
        """Return the shape of the local shard of the rank at this coordinate."""
        return tuple(math.prod(stop - start for start, stop in dim) for dim in self.ranges(coordinate))

    def offset(self, coordinate: Coordinate) -> tuple[int, ...]:
        """Return for each dim the global index of the shard's first element; the dim's end if the shard is empty."""
        result = []
        for dim, ranges in zip(self.dims, self.ranges(coordinate), strict=True):
            index = 0
            for factor, (start, _) in zip(dim, ranges, strict=True):
                index = index * factor.size + start
            empty = any(start == stop for start, stop in ranges)
            result.append(math.prod(factor.size for factor in dim) if empty else index)
        return tuple(result)

    def runs(self, coordinate: Coordinate) -> tuple[tuple[Run, ...], ...]:
        """Return for each dim the global `[start, stop)` runs of contiguous indices held, in local order."""
        places = (tuple([coordinate[axis] for factor in dim for axis in factor.axes]) for dim in self.dims)
        return tuple([_runs_at(self.mesh_sizes, dim, place) for dim, place in zip(self.dims, places, strict=True)])

    def max_local_numel(self) -> int:
        """Return the most elements that any rank holds, with the hints of symbolic sizes."""
        sizes, most = self.mesh_sizes, 1
        for dim in self.dims:
            for size, axes in dim:  # `largest_piece`, inlined: propagation calls this for every layout that it tries
                for axis in axes:
                    size = -(-size // sizes[axis])
                most *= size
        return hint(most)

    def is_even(self) -> bool:
        """Return whether all local shards have the same shape."""
        return all(divides_evenly(self.mesh_sizes, factor) for dim in self.dims for factor in dim)

    def without_partial(self) -> Layout:
        """Return this layout with Partial axes replicated."""
        return Layout.make(self.mesh_sizes, self.dims) if self.partial else self

    def hinted(self) -> Layout:
        """Return this layout with symbolic sizes replaced by their hints."""
        dims = hinted(self.dims)
        return self if dims is self.dims else Layout.make(self.mesh_sizes, dims, self.partial)

    def __repr__(self) -> str:
        dims = ", ".join(dim_text(dim) for dim in self.dims)
        return f"Layout[{dims}]" + "".join(f" {op}({axis})" for axis, op in self.partial)


def dim_text(dim: Dim) -> str:
    """Return a dim as text with axes by index, such as `8@0,1`, or `(3 16@0)` for several factors."""
    texts = [str(f.size) + ("@" + ",".join(map(str, f.axes)) if f.axes else "") for f in dim]
    return texts[0] if len(texts) == 1 else f"({' '.join(texts)})"


# ---- one factor ----------------------------------------------------------------------------------------------


def chunk_range(start: int, stop: int, pieces: int, index: int) -> Run:
    """Return chunk `index` of `[start, stop)` in `pieces`, as `torch.chunk` makes them, with empty ones at the end."""
    size = stop - start
    if size % pieces == 0:  # for a symbolic size this adds a guard: the graph serves sizes that divide evenly
        low = start + size // pieces * index
        return low, low + size // pieces
    if type(size) is not int:
        start, stop = specialized(start), specialized(stop)
    step = -(-(stop - start) // pieces)
    low = min(start + step * index, stop)
    return low, min(low + step, stop)


def factor_range(sizes: Sizes, factor: Factor, coordinate: Coordinate) -> Run:
    """Return the `[start, stop)` of a factor that the rank at this coordinate holds."""
    start, stop = 0, factor.size
    for axis in factor.axes:
        start, stop = chunk_range(start, stop, sizes[axis], coordinate[axis])
    return start, stop


def largest_piece(sizes: Sizes, factor: Factor) -> int:
    """Return the size of the largest chunk of a factor."""
    size = factor.size
    for axis in factor.axes:
        size = -(-size // sizes[axis])
    return size


def pieces(sizes: Sizes, axes: Sequence[int]) -> int:
    """Return the number of chunks that these axes make."""
    return math.prod(sizes[axis] for axis in axes)


def divides_evenly(sizes: Sizes, factor: Factor) -> bool:
    """Return whether all chunks of a factor have the same size."""
    return factor.size % pieces(sizes, factor.axes) == 0


@lru_cache(maxsize=16384)
def aligned(sizes: Sizes, major: int, minor: int, axes: tuple[int, ...]) -> bool:
    """Return whether chunks of `major * minor` by these axes are chunks of `major` times `minor`, on every rank."""
    if major % pieces(sizes, axes) == 0:
        return True
    for indices in itertools.product(*(range(sizes[axis]) for axis in axes)):
        merged, outer = (0, major * minor), (0, major)
        for axis, index in zip(axes, indices, strict=True):
            merged = chunk_range(*merged, sizes[axis], index)
            outer = chunk_range(*outer, sizes[axis], index)
        size = (outer[1] - outer[0]) * minor
        if merged[1] - merged[0] != size or (size and merged[0] != outer[0] * minor):
            return False
    return True


def split_factor(sizes: Sizes, factor: Factor, major: int) -> tuple[Factor, Factor] | None:
    """Return the factor as two: one of size `major`, and the rest; None if a shard begins or ends inside the rest."""
    if major == 0 or factor.size % major:
        return None
    minor = factor.size // major
    for count in range(len(factor.axes), -1, -1):
        outer, inner = factor.axes[:count], factor.axes[count:]
        if aligned(sizes, major, minor, outer) and (not inner or largest_piece(sizes, Factor(major, outer)) <= 1):
            return Factor(major, outer), Factor(minor, inner)
    return None


# ---- one dim -------------------------------------------------------------------------------------------------


@lru_cache(maxsize=16384)
def plain_dim(size: int, axes: tuple[int, ...]) -> Dim:
    """Return a dim of one factor. Cached, since the layouts that propagation tries differ in a dim or two."""
    return (Factor(size, axes),)


def dim_axes(dim: Dim) -> tuple[int, ...]:
    """Return all axes that shard a dim."""
    return tuple(axis for factor in dim for axis in factor.axes)


@lru_cache(maxsize=16384)
def canonical(sizes: Sizes, dim: Dim) -> Dim:
    """Return a dim with the same local indices on every rank, with neighbouring factors merged where possible."""
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
    """Return the contiguous global runs of one dim, given the range held of each of its factors."""
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


@cached_within(16 << 20, lambda runs: 120 * len(runs))
def _runs_at(sizes: Sizes, dim: Dim, place: tuple[int, ...]) -> tuple[Run, ...]:
    """Return the runs of one dim for ranks with these indices on the axes that shard it."""
    indices = iter(place)
    ranges = []
    for factor in dim:
        start, stop = 0, factor.size
        for axis in factor.axes:
            start, stop = chunk_range(start, stop, sizes[axis], next(indices))
        ranges.append((start, stop))
    return dim_runs(dim, ranges)
