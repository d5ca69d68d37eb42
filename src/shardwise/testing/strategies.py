"""Hypothesis strategies: meshes, shapes, dtypes, placements, `P` forms and specs.

>>> @given(redistributions())
... def test_any_pair(case):
...     with shardwise.simulate(case.ranks):
...         mesh = init_device_mesh("cpu", case.mesh_shape)
...         x = make_dtensor(case.value(), mesh, case.source, seed=case.seed)
...         assert torch.equal(assemble(x.redistribute(placements=case.target)), case.value())
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..errors import InputError, LayoutError
from ..sharding.from_placements import default_order, from_placements
from ..sharding.mesh import mesh_info_of
from ..sharding.placement import (
    REDUCE_OPS,
    AnyShard,
    DimAxes,
    InterleavedShard,
    P,
    Partial,
    Placement,
    Placements,
    Replicate,
    Shard,
)
from ..sharding.spec import DTensorSpec, contiguous_meta

try:
    from hypothesis import strategies as st
    from hypothesis.strategies import DrawFn, SearchStrategy
except ImportError as error:
    raise InputError("shardwise.testing.strategies needs hypothesis", "pip install hypothesis") from error

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
DTYPES = (*FLOATS, *INTEGERS, torch.bool, torch.complex64)


def mesh_shapes(max_ranks: int = 8, max_axes: int = 3) -> SearchStrategy[tuple[int, ...]]:
    """Mesh shapes of at most this number of ranks; some axes have size 1."""
    sizes = range(1, max_ranks + 1)
    shapes = itertools.chain(*(itertools.product(sizes, repeat=axes) for axes in range(1, max_axes + 1)))
    fitting = [shape for shape in shapes if math.prod(shape) <= max_ranks]
    return st.sampled_from(sorted(fitting, key=lambda shape: (math.prod(shape), shape)))


def tensor_shapes(max_dims: int = 3, max_size: int = 9, min_dims: int = 0) -> SearchStrategy[tuple[int, ...]]:
    """Shapes with even, uneven, small and zero sizes, and the shape without dims."""
    size = st.integers(1, max_size) | st.sampled_from([n for n in (0, 1, 4, 6, 8) if n <= max_size])
    return st.lists(size, min_size=min_dims, max_size=max_dims).map(tuple)


def dtypes(choices: Sequence[torch.dtype] = DTYPES) -> SearchStrategy[torch.dtype]:
    """Dtypes among `choices`, by default all that can be reduced."""
    return st.sampled_from(tuple(choices))


def reduce_ops(dtype: torch.dtype = torch.float32) -> SearchStrategy[str]:
    """Reduction ops that a dtype supports."""
    return st.sampled_from(allowed_ops(dtype))


def allowed_ops(dtype: torch.dtype) -> tuple[str, ...]:
    """Return the reduction ops of a dtype: no average of integers, no max or min of complex numbers."""
    if dtype.is_complex:
        return ("sum", "avg", "product")
    return REDUCE_OPS if dtype.is_floating_point else tuple(op for op in REDUCE_OPS if op != "avg")


@st.composite
def placements(
    draw: DrawFn,
    mesh_shape: Sequence[int],
    shape: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    partial: bool = True,
    interleaved: bool = True,
) -> tuple[Placement, ...]:
    """One legal placement for each axis; dims may be negative."""
    kinds: list[SearchStrategy[Placement]] = [st.just(Replicate())]
    if partial:
        kinds.append(reduce_ops(dtype).map(Partial))
    if shape:
        dims = st.integers(-len(shape), len(shape) - 1)
        kinds += [dims.map(Shard)] * 2
        if interleaved:
            kinds.append(st.builds(InterleavedShard, dims, st.integers(2, 3)))
    drawn = tuple(draw(st.lists(st.one_of(kinds), min_size=len(mesh_shape), max_size=len(mesh_shape))))
    return drawn if is_legal(mesh_shape, shape, drawn) else tuple(map(_without_interleaving, drawn))


def is_legal(mesh_shape: Sequence[int], shape: Sequence[int], given: Sequence[Placement]) -> bool:
    """Return whether a tensor of this shape can have these placements: an interleaved shard must divide its dim."""
    normal = [_with_dim(p, p.dim % len(shape)) if isinstance(p, AnyShard) else p for p in given]
    try:
        from_placements(tuple(mesh_shape), tuple(shape), normal, default_order(normal))
    except LayoutError:
        return False
    return True


def _with_dim(shard: AnyShard, dim: int) -> AnyShard:
    return InterleavedShard(dim, shard.blocks) if isinstance(shard, InterleavedShard) else Shard(dim)


def _without_interleaving(placement: Placement) -> Placement:
    return Shard(placement.dim) if isinstance(placement, InterleavedShard) else placement


@st.composite
def p_forms(
    draw: DrawFn, axis_names: Sequence[str], ndim: int, *, dtype: torch.dtype = torch.float32, partial: bool = True
) -> P:
    """`P(...)` over these axes: each shards a dim, in any order, or is Partial, or replicates."""
    names = draw(st.permutations(axis_names))
    dims: list[tuple[str, ...]] = [()] * ndim
    partial_axes = {}
    for name in names:
        place = draw(st.integers(-2 if partial else -1, ndim - 1))
        if place >= 0:
            dims[place] = (*dims[place], name)
        elif place == -2:
            partial_axes[name] = draw(reduce_ops(dtype))
    entries: list[DimAxes] = [None if not axes else axes[0] if len(axes) == 1 else axes for axes in dims]
    while entries and entries[-1] is None and draw(st.booleans()):
        entries.pop()  # dims left out at the end are not sharded
    return P(*entries, partial=partial_axes)


@st.composite
def specs(
    draw: DrawFn, mesh: DeviceMesh, *, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None
) -> DTensorSpec:
    """Specs on a mesh, in a running world."""
    mesh_info = mesh_info_of(mesh)
    shape = draw(tensor_shapes()) if shape is None else shape
    dtype = draw(dtypes()) if dtype is None else dtype
    return DTensorSpec(
        mesh, draw(any_placements(mesh_info.sizes, mesh_info.names, shape, dtype)), contiguous_meta(shape, dtype)
    )


def any_placements(
    mesh_shape: Sequence[int], axis_names: Sequence[str], shape: Sequence[int], dtype: torch.dtype = torch.float32
) -> SearchStrategy[Placements]:
    """A placement list or a `P` form."""
    return placements(mesh_shape, shape, dtype=dtype) | p_forms(axis_names, len(shape), dtype=dtype)


@dataclass(frozen=True)
class Redistribution:
    """A mesh, a tensor, and two placements of it."""

    mesh_shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    source: Placements
    target: Placements
    seed: int

    @property
    def ranks(self) -> int:
        """The number of ranks of the mesh."""
        return math.prod(self.mesh_shape)

    def value(self) -> Tensor:
        """Return small integers in this dtype, determined by the seed."""
        return integer_values(self.shape, self.dtype, self.seed)


def integer_values(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    """Return small integers, whose sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    low, high = (0, 2) if dtype is torch.bool else (0, 13) if not dtype.is_signed else (-12, 13)
    drawn = torch.randint(low, high, tuple(shape), generator=generator)
    if dtype.is_complex:
        imaginary = torch.randint(low, high, tuple(shape), generator=generator)
        return torch.complex(drawn.double(), imaginary.double()).to(dtype)
    return drawn.to(dtype)


@st.composite
def redistributions(draw: DrawFn, max_ranks: int = 8, choices: Sequence[torch.dtype] = DTYPES) -> Redistribution:
    """A mesh, a tensor, and two placements of it, of every kind."""
    mesh_shape, shape, dtype = draw(mesh_shapes(max_ranks)), draw(tensor_shapes()), draw(dtypes(choices))
    names = ("a", "b", "c", "d", "e", "f", "g", "h")[: len(mesh_shape)]
    either = any_placements(mesh_shape, names, shape, dtype)
    return Redistribution(mesh_shape, names, shape, dtype, draw(either), draw(either), draw(st.integers(0, 2**31)))
