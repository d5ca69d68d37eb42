"""Specs: a tensor's shape, stride and dtype together with the mesh and the way it is cut.

Specs are frozen and interned: two equal specs are one object, so a cache looks them up by identity.

>>> DTensorSpec(mesh, (Partial(), Shard(1)), TensorMeta(torch.Size([8, 16]), (16, 1), torch.float32))
f32[8, 16@tp] sum(dp)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..errors import InputError, LayoutError, PlacementError
from .layout import Coordinate, Dim, Factor, Layout, default_order, from_placements, to_placements
from .memory_order import TensorMeta as TensorMeta
from .memory_order import contiguous_meta as contiguous_meta
from .memory_order import contiguous_stride as contiguous_stride
from .memory_order import in_memory_order as in_memory_order
from .memory_order import memory_order as memory_order
from .mesh import MeshDescription, MeshInfo, mesh_description, mesh_info_of, mesh_like, names_text
from .once import making
from .placement import InterleavedShard, P, Partial, Placement, Placements, Replicate, Shard, ShardOrder

DTYPE_NAMES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
    torch.complex64: "c64",
    torch.complex128: "c128",
}


_MAX_DERIVED = 256
"""How many specs one spec caches: one for each placement, dtype and the like that its tensors are brought to."""


class DTensorSpec:
    """Mesh, placements, order of the cuts, and `TensorMeta` of a distributed tensor.

    `placements` and `shard_order` are None for the few layouts that no placement list can say; `layout` always
    says it.
    """

    __slots__ = ("__weakref__", "_derived", "_placements", "_shard_order", "layout", "mesh_info", "tensor_meta")

    mesh_info: MeshInfo
    layout: Layout
    tensor_meta: TensorMeta
    _placements: tuple[Placement, ...] | None
    _shard_order: ShardOrder
    _derived: dict[Hashable, DTensorSpec]

    def __new__(
        cls,
        mesh: DeviceMesh,
        placements: Placements,
        tensor_meta: TensorMeta,
        shard_order: ShardOrder | None = None,
    ) -> DTensorSpec:
        mesh_info = mesh_info_of(mesh)
        normal, order = normalize_placements(mesh_info, placements, len(tensor_meta.shape), shard_order)
        try:
            layout = from_placements(mesh_info.sizes, tensor_meta.shape, normal, order)
        except LayoutError as error:
            where = f"{list(normal)} on shape {list(tensor_meta.shape)} over {mesh_info}"
            raise LayoutError(f"{where}: {error.problem}", error.fix) from None
        return cls._intern(mesh_info, layout, normal, order, tensor_meta)

    @classmethod
    def from_layout(cls, mesh_info: MeshInfo, layout: Layout, tensor_meta: TensorMeta) -> DTensorSpec:
        """The spec of a layout on a mesh."""
        said = to_placements(layout)
        if said is None:
            return cls._intern(mesh_info, layout, None, (), tensor_meta)
        return cls._intern(mesh_info, layout, said[0], said[1], tensor_meta)

    @classmethod
    def _intern(
        cls,
        mesh_info: MeshInfo,
        layout: Layout,
        placements: tuple[Placement, ...] | None,
        order: ShardOrder,
        meta: TensorMeta,
    ) -> DTensorSpec:
        key = (layout, placements, order, meta)
        found = mesh_info.specs.get(key)
        if found is None:
            found = object.__new__(cls)
            names = ("mesh_info", "layout", "_placements", "_shard_order", "tensor_meta", "_derived")
            values: tuple[object, ...] = (mesh_info, *key, {})
            for name, value in zip(names, values, strict=True):
                object.__setattr__(found, name, value)
            with making:
                found = mesh_info.specs.setdefault(key, found)
        return found

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a spec is frozen; make a new one to change {name}")

    def __reduce__(self) -> tuple[Any, ...]:
        description = mesh_description(self.mesh)
        return rebuild_spec, (description, self.placements, tuple(self.tensor_meta), self.shard_order)

    def __copy__(self) -> DTensorSpec:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensorSpec:
        return self

    # ---- what it says -------------------------------------------------------------------------------------

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh the tensor lives on."""
        return self.mesh_info.mesh

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh the tensor lives on."""
        return self.mesh_info.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement for each mesh axis."""
        if self._placements is None:
            raise LayoutError(
                f"{self!r} is cut in a way that no placement list can say", "read spec.layout, or redistribute first"
            )
        return self._placements

    @property
    def shard_order(self) -> ShardOrder:
        """For each cut dim the axes that cut it, major to minor."""
        return self._shard_order

    @property
    def shape(self) -> torch.Size:
        """The global shape."""
        return self.tensor_meta.shape

    @property
    def stride(self) -> tuple[int, ...]:
        """The global strides."""
        return self.tensor_meta.stride

    @property
    def ndim(self) -> int:
        """The number of tensor dims."""
        return len(self.tensor_meta.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype."""
        return self.tensor_meta.dtype

    @property
    def dim_map(self) -> list[int]:
        """For each dim the axis that cuts it, -1 for none; an error where several axes cut one dim."""
        result = []
        for dim in self.layout.dims:
            axes = dim_axes(dim)
            if len(axes) > 1:
                raise LayoutError(f"{self!r} has a dim cut by several axes", "read shard_order, which lists them all")
            result.append(axes[0] if axes else -1)
        return result

    @property
    def num_shards_map(self) -> list[int]:
        """For each dim in how many pieces it is cut."""
        return [math.prod(self.mesh_info.sizes[axis] for axis in dim_axes(dim)) for dim in self.layout.dims]

    @property
    def num_shards(self) -> int:
        """In how many pieces the tensor is cut."""
        return math.prod(self.num_shards_map)

    @property
    def sums(self) -> list[int]:
        """The axes that hold operands of a reduction."""
        return [axis for axis, _ in self.layout.partial]

    def is_replicated(self) -> bool:
        """Whether every rank holds the whole value."""
        return not self.is_sharded() and not self.layout.partial

    def is_sharded(self) -> bool:
        """Whether some axis cuts a dim."""
        return any(dim_axes(dim) for dim in self.layout.dims)

    def local_shape(self, coordinate: Coordinate) -> tuple[int, ...]:
        """The shape held by the rank at this coordinate."""
        return self.layout.local_shape(coordinate)

    def global_offset(self, coordinate: Coordinate) -> tuple[int, ...]:
        """For each dim the global index of the first element held by the rank at this coordinate."""
        return self.layout.offset(coordinate)

    # ---- other specs from it --------------------------------------------------------------------------------

    def with_layout(self, layout: Layout) -> DTensorSpec:
        """The same tensor under another layout (row-major, as freshly moved data is)."""
        return DTensorSpec.from_layout(self.mesh_info, layout, contiguous_meta(self.shape, self.dtype))

    def with_meta(self, meta: TensorMeta) -> DTensorSpec:
        """Another tensor of the same shape, cut in the same way."""
        return DTensorSpec._intern(self.mesh_info, self.layout, self._placements, self._shard_order, meta)

    def derived(self, key: Hashable, make: Callable[[], DTensorSpec]) -> DTensorSpec:
        """The spec that `make` returns, cached on this one under `key`."""
        found = self._derived.get(key)
        if found is None:
            found = make()
            if found is not self:  # a spec that refers to itself would wait for the garbage collector
                if len(self._derived) >= _MAX_DERIVED:
                    self._derived.clear()
                self._derived[key] = found
        return found

    def with_placements(self, placements: Placements) -> DTensorSpec:
        """The spec of the same tensor with other placements: row-major, unless that leaves its data where it is."""
        key = tuple(placements) if isinstance(placements, list) else placements
        if isinstance(key, (P, tuple)):
            return self.derived(key, lambda: self._placed(placements))
        return self._placed(placements)

    def _placed(self, placements: Placements) -> DTensorSpec:
        normal, order = normalize_placements(self.mesh_info, placements, self.ndim)
        target = DTensorSpec(self.mesh, normal, self.tensor_meta, order)
        if target.layout is self.layout:
            return target
        return target.with_meta(contiguous_meta(self.shape, self.dtype))

    def with_dtype(self, dtype: torch.dtype) -> DTensorSpec:
        """The spec of a tensor with another dtype, with the same shape, strides and placements."""
        if self.tensor_meta.dtype == dtype:
            return self
        return self.derived(dtype, lambda: self.with_meta(self.tensor_meta._replace(dtype=dtype)))

    def replicated(self, *, row_major: bool = False) -> DTensorSpec:
        """The spec of the same tensor, replicated on every mesh axis, with its own strides or row-major ones."""
        return self.derived(("replicated", row_major), lambda: _replicated(self, row_major))

    def cotangent(self) -> DTensorSpec:
        """The spec of this tensor's gradient: as the tensor itself, with Partial axes replicated."""
        return self.derived("cotangent", lambda: _cotangent(self)) if self.layout.partial else self

    def __repr__(self) -> str:
        return spec_text(self.layout, self.dtype, self.mesh_info.names)


def rebuild_spec(
    description: MeshDescription, placements: Sequence[Placement], meta: tuple[Any, ...], order: ShardOrder
) -> DTensorSpec:
    """A spec from its pickled form, on the mesh of this world that looks like the one it was saved on."""
    return DTensorSpec(mesh_like(description), placements, TensorMeta(*meta), order)


def _replicated(spec: DTensorSpec, row_major: bool) -> DTensorSpec:
    if spec.is_replicated() and not row_major:
        return spec
    sizes = spec.mesh_info.sizes
    layout = Layout.make(sizes, [(Factor(size, ()),) for size in spec.shape])
    meta = contiguous_meta(spec.shape, spec.dtype) if row_major else spec.tensor_meta
    return DTensorSpec._intern(spec.mesh_info, layout, (Replicate(),) * len(sizes), (), meta)


def _cotangent(spec: DTensorSpec) -> DTensorSpec:
    placements = spec._placements and tuple(Replicate() if p.is_partial() else p for p in spec._placements)
    layout = spec.layout.without_partial()
    return DTensorSpec._intern(spec.mesh_info, layout, placements, spec._shard_order, spec.tensor_meta)


def dim_axes(dim: Dim) -> tuple[int, ...]:
    """All axes that cut a dim."""
    return tuple(axis for factor in dim for axis in factor.axes)


def spec_text(layout: Layout, dtype: torch.dtype, names: Sequence[str]) -> str:
    """One line such as `f32[8, 16@tp] sum(dp)`; an interleaved dim prints its factors, `(3 16@tp)`."""

    def factor_text(size: int, axes: tuple[int, ...]) -> str:
        return f"{size}@{names_text([names[axis] for axis in axes])}" if axes else str(size)

    dims = []
    for dim in layout.dims:
        texts = [factor_text(*factor) for factor in dim]
        dims.append(texts[0] if len(texts) == 1 else f"({' '.join(texts)})")
    dtype_name = DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))
    partial = "".join(f" {op}({names[axis]})" for axis, op in layout.partial)
    return f"{dtype_name}[{', '.join(dims)}]{partial}"


def normalize_placements(
    mesh_info: MeshInfo, placements: Placements | None, ndim: int, order: ShardOrder | None = None
) -> tuple[tuple[Placement, ...], ShardOrder]:
    """Placements as a checked tuple with dims >= 0, and the order of the cuts. None means replicated."""
    if placements is None:
        return (Replicate(),) * len(mesh_info.sizes), ()
    if isinstance(placements, P):
        return placements.resolve(mesh_info.names, ndim)
    if isinstance(placements, (Placement, str)) or not isinstance(placements, Sequence):
        raise InputError(
            f"placements is {placements!r}", "pass a list with one placement for each mesh axis, or P(...)"
        )
    if len(placements) != len(mesh_info.sizes):
        raise PlacementError(
            f"{_count(len(placements), 'placement')} {list(placements)} for {mesh_info!r}, "
            f"which has {_count(len(mesh_info.sizes), 'axis', 'axes')}",
            "give one placement for each axis",
        )
    normal = tuple(_normalize(placement, mesh_info.names[axis], ndim) for axis, placement in enumerate(placements))
    default = default_order(normal)
    if order is None:
        return normal, default
    given = {dim % max(ndim, 1): tuple(axes) for dim, axes in order if axes}
    if {dim: sorted(axes) for dim, axes in given.items()} != {dim: list(axes) for dim, axes in default}:
        raise PlacementError(
            f"the shard order {tuple(order)} does not list the axes that {list(normal)} cut with",
            f"list the same axes, in any order: {default}",
        )
    return normal, tuple(type(entry)(entry.tensor_dim, given[entry.tensor_dim]) for entry in default)


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _normalize(placement: Placement, axis_name: str, ndim: int) -> Placement:
    if isinstance(placement, (Replicate, Partial)):
        return placement
    if not isinstance(placement, Shard):
        theirs = type(placement).__module__.startswith("torch.distributed")
        fix = "import Shard, Replicate and Partial from shardwise" if theirs else "use Shard, Replicate or Partial"
        kind = f"{type(placement).__module__}.{type(placement).__name__}"
        raise InputError(f"the placement of axis {axis_name} is {placement!r}, a {kind}", fix)
    if not -ndim <= placement.dim < ndim:
        fix = f"use a dim in [{-ndim}, {ndim - 1}]" if ndim else "a 0-dim tensor can be replicated or partial only"
        raise PlacementError(f"{placement!r} on axis {axis_name}, for a tensor of {ndim} dims", fix)
    dim = placement.dim % ndim
    if isinstance(placement, InterleavedShard) and placement.blocks > 1:
        return InterleavedShard(dim, placement.blocks)
    return Shard(dim)
