"""Specs: a tensor's shape, stride and dtype together with its mesh and how it is sharded.

Specs are frozen and interned: two equal specs are one object, so a cache looks them up by identity.

>>> DTensorSpec(mesh, (Partial(), Shard(1)), TensorMeta(torch.Size([8, 16]), (16, 1), torch.float32))
f32[8, 16@tp] sum(dp)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import Field, dataclass
from typing import ClassVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from .._torch.symbols import specialized
from ..errors import LayoutError
from .drawn import Drawn
from .from_placements import default_order, in_mesh_order, resolve_placements, to_placements, with_order
from .layout import Coordinate, Factor, Layout, dim_axes
from .memory_order import MemoryOrder, is_dense, memory_order
from .memory_order import TensorMeta as TensorMeta
from .memory_order import contiguous_meta as contiguous_meta
from .mesh import MeshDescription, MeshInfo, mesh_description, mesh_info_of, mesh_like
from .normalize import normalize_placements as normalize_placements
from .once import making
from .placement import P, Placement, Placements, Replicate, ShardOrder
from .spec_text import placements_text, spec_text

_MAX_DERIVED = 256
"""How many derived specs one spec caches: with other placements, dtypes, strides and so on."""


@dataclass
class _Arguments:
    """The arguments of a spec, as fields: `dataclasses.replace(spec, tensor_meta=...)` makes another spec."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    tensor_meta: TensorMeta
    shard_order: ShardOrder


class DTensorSpec(Drawn):
    """Mesh, placements, shard order and `TensorMeta` of a distributed tensor.

    `layout` describes which elements each rank holds. A few layouts, made by views of uneven shards, cannot be written
    as a list of placements: `placements` then raises an error.

    >>> spec = DTensorSpec(mesh, P("dp", "tp"), TensorMeta(torch.Size([8, 16]), (16, 1), torch.float32))
    >>> spec
    f32[8@dp, 16@tp]
    >>> spec.placements, spec.local_shape((0, 1)), spec.global_offset((0, 1))
    ((Shard(dim=0), Shard(dim=1)), (4, 8), (0, 8))
    """

    __slots__ = (
        "__weakref__",
        "_alone",
        "_derived",
        "_order",
        "_placements",
        "_shard_order",
        "dense",
        "layout",
        "mesh_info",
        "tensor_meta",
    )

    __dataclass_fields__: ClassVar[dict[str, Field[object]]] = _Arguments.__dataclass_fields__
    mesh_info: MeshInfo
    layout: Layout
    tensor_meta: TensorMeta
    _alone: tuple[Placement, ...]
    dense: bool
    """Whether the global tensor has no gaps in memory, and no expanded dims."""
    _placements: tuple[Placement, ...] | None
    _shard_order: ShardOrder
    _derived: dict[Hashable, DTensorSpec]
    _order: MemoryOrder | None

    def __new__(
        cls,
        mesh: DeviceMesh,
        placements: Placements,
        tensor_meta: TensorMeta,
        shard_order: ShardOrder | None = None,
    ) -> DTensorSpec:
        return cls._of_placements(mesh_info_of(mesh), placements, tensor_meta, shard_order)

    @classmethod
    def _of_placements(
        cls, mesh_info: MeshInfo, placements: Placements, tensor_meta: TensorMeta, shard_order: ShardOrder | None
    ) -> DTensorSpec:
        normal, order = normalize_placements(mesh_info, placements, len(tensor_meta.shape), shard_order)
        try:
            layout, normal, order = resolve_placements(mesh_info.sizes, tensor_meta.shape, normal, order)
        except LayoutError as error:
            where = f"{list(normal)} on shape {list(tensor_meta.shape)} over {mesh_info}"
            raise LayoutError(f"{where}: {error.problem}", error.fix) from None
        return cls._intern(mesh_info, layout, normal, order, tensor_meta)

    @classmethod
    def from_layout(cls, mesh_info: MeshInfo, layout: Layout, tensor_meta: TensorMeta) -> DTensorSpec:
        """Return the spec of a tensor with this layout."""
        placements, order = to_placements(layout) or (None, ())
        return cls._intern(mesh_info, layout, placements, order, tensor_meta)

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
            names = ("mesh_info", "layout", "_placements", "_shard_order", "tensor_meta", "_derived", "dense")
            values: tuple[object, ...] = (mesh_info, *key, {}, is_dense(meta))
            for name, value in zip(names, values, strict=True):
                object.__setattr__(found, name, value)
            with making:
                found = mesh_info.specs.setdefault(key, found)
        return found

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a spec is frozen; make a new one to change {name}")

    def __reduce__(self) -> tuple[object, ...]:
        description = mesh_description(self.mesh)
        return rebuild_spec, (description, self.placements, tuple(self.tensor_meta), self.shard_order)

    def __copy__(self) -> DTensorSpec:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> DTensorSpec:
        return self

    format_shard_order_str = staticmethod(placements_text)  # torch.fx prints distributed tensors in a graph by it

    @staticmethod
    def is_default_device_order(shard_order: ShardOrder) -> bool:
        """Return whether the axes shard every dim from left to right."""
        return all(list(axes) == sorted(axes) for _, axes in shard_order)

    # ---- properties ---------------------------------------------------------------------------------------------

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of the tensor."""
        return self.mesh_info.mesh

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh of the tensor."""
        return self.mesh_info.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement for each mesh axis; together with `shard_order` they describe the sharding."""
        if self._placements is None:
            raise LayoutError(
                f"{self!r} is sharded in a way that no list of placements describes",
                "read spec.layout, or redistribute first",
            )
        return self._placements

    @property
    def placements_alone(self) -> tuple[Placement, ...]:
        """Placements that describe the sharding without a shard order: given to `from_local`, they mean this layout.

        An axis that shards a dim after an axis to its right is an `InterleavedShard`: `f32[8@(b, a)]` on a 2x2 mesh has
        the placements `(InterleavedShard(0, blocks=2), Shard(0))`. If shards are uneven, all axes of the dim are
        `OrderedShard`s.
        """
        try:
            return self._alone
        except AttributeError:
            own = self._placements
            plain = own is not None and self._shard_order == default_order(own)
            found = own if plain else in_mesh_order(self.layout)
            if found is None and own is not None:
                found = with_order(own, self._shard_order)
        if found is None:
            raise LayoutError(
                f"{self!r} is sharded in a way that no list of placements describes",
                "read spec.layout, or redistribute first",
            )
        object.__setattr__(self, "_alone", found)
        return found

    @property
    def shard_order(self) -> ShardOrder:
        """For each sharded dim the axes that shard it, major to minor."""
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
    def memory_order(self) -> MemoryOrder | None:
        """The order of the dims in memory, in the global tensor and in its shards; None if that is row-major."""
        try:
            return self._order
        except AttributeError:
            object.__setattr__(self, "_order", memory_order(self.tensor_meta))
            return self._order

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
        """For each dim the axis that shards it, -1 for none. Raises an error if several axes shard one dim."""
        result = []
        for dim in self.layout.dims:
            axes = dim_axes(dim)
            if len(axes) > 1:
                raise LayoutError(
                    f"{self!r} has a dim sharded over several axes", "read shard_order, which lists them all"
                )
            result.append(axes[0] if axes else -1)
        return result

    @property
    def num_shards_map(self) -> list[int]:
        """For each dim the number of shards."""
        return [math.prod(self.mesh_info.sizes[axis] for axis in dim_axes(dim)) for dim in self.layout.dims]

    @property
    def num_shards(self) -> int:
        """The number of shards of the tensor."""
        return math.prod(self.num_shards_map)

    @property
    def sums(self) -> list[int]:
        """The Partial axes."""
        return [axis for axis, _ in self.layout.partial]

    def is_replicated(self) -> bool:
        """Return whether every rank holds the global tensor."""
        return not self.is_sharded() and not self.layout.partial

    def is_sharded(self) -> bool:
        """Return whether some axis shards a dim."""
        return any(dim_axes(dim) for dim in self.layout.dims)

    def local_shape(self, coordinate: Coordinate) -> tuple[int, ...]:
        """Return the shape of the local shard of the rank at this coordinate."""
        return self.layout.local_shape(coordinate)

    def global_offset(self, coordinate: Coordinate) -> tuple[int, ...]:
        """Return for each dim the global index of the first element of the local shard at this coordinate."""
        return self.layout.offset(coordinate)

    # ---- derived specs ------------------------------------------------------------------------------------------

    def derived(self, key: Hashable, make: Callable[[], DTensorSpec]) -> DTensorSpec:
        """Return the spec that `make` returns, cached on this one under `key`."""
        found = self._derived.get(key)
        if found is None:
            found = make()
            if found is not self:  # a spec that refers to itself would live until the garbage collector runs
                if len(self._derived) >= _MAX_DERIVED:
                    self._derived.clear()
                self._derived[key] = found
        return found

    def with_layout(self, layout: Layout) -> DTensorSpec:
        """Return the spec of the same tensor with another layout: row-major, as redistributed data is."""
        return DTensorSpec.from_layout(self.mesh_info, layout, contiguous_meta(self.shape, self.dtype))

    def with_meta(self, meta: TensorMeta) -> DTensorSpec:
        """Return the spec of another tensor of the same shape, sharded in the same way."""
        if meta == self.tensor_meta:
            return self
        return self._derived.get(meta) or self.derived(meta, lambda: self._with_other_meta(meta))

    def _with_other_meta(self, meta: TensorMeta) -> DTensorSpec:
        return DTensorSpec._intern(self.mesh_info, self.layout, self._placements, self._shard_order, meta)

    def with_placements(self, placements: Placements) -> DTensorSpec:
        """Return the spec of the same tensor with other placements: row-major, unless its layout stays the same."""
        key = tuple(placements) if type(placements) is list else placements
        if isinstance(key, (tuple, P)):
            try:
                # The look-up of `derived`, without the cost of a call: every redistribute runs this line.
                return self._derived.get(key) or self.derived(key, lambda: self._placed(placements))
            except TypeError:  # an entry is not hashable, so it is no placement: `_placed` raises the error
                pass
        return self._placed(placements)

    def _placed(self, placements: Placements) -> DTensorSpec:
        target = DTensorSpec._of_placements(self.mesh_info, placements, self.tensor_meta, None)
        if target.layout is self.layout:
            return target
        return target.with_meta(contiguous_meta(self.shape, self.dtype))

    def with_dtype(self, dtype: torch.dtype) -> DTensorSpec:
        """Return the spec of a tensor with another dtype, with the same shape, strides and placements."""
        if self.tensor_meta.dtype == dtype:
            return self
        return self.derived(dtype, lambda: self.with_meta(self.tensor_meta._replace(dtype=dtype)))

    def replicated(self, *, row_major: bool = False) -> DTensorSpec:
        """Return the spec of the same tensor replicated on every mesh axis, with its own strides or row-major ones."""
        return self.derived(("replicated", row_major), lambda: _replicated(self, row_major))

    def specialized(self) -> DTensorSpec:
        """Return the spec with numbers for symbolic sizes: a graph that is being traced is valid for these alone."""
        meta = specialized(self.tensor_meta)
        layout = Layout.make(self.layout.mesh_sizes, specialized(self.layout.dims), self.layout.partial)
        return DTensorSpec._intern(self.mesh_info, layout, self._placements, self._shard_order, meta)

    def cotangent(self) -> DTensorSpec:
        """Return the spec of this tensor's gradient: the same with Partial axes replicated, and without memory gaps."""
        return self if self.dense and not self.layout.partial else self.derived("cotangent", lambda: _cotangent(self))

    def _check_equals(self, other: object, skip_shapes: bool = False) -> bool:
        """Return whether a graph for one spec is valid for the other; Dynamo calls this.

        Global shapes are always compared: the local shapes that Dynamo guards do not determine them.
        """
        return self is other

    def __repr__(self) -> str:
        return spec_text(self.layout, self.dtype, self.mesh_info.names)


def rebuild_spec(
    description: MeshDescription,
    placements: Sequence[Placement],
    meta: tuple[torch.Size, tuple[int, ...], torch.dtype],
    order: ShardOrder,
) -> DTensorSpec:
    """Return a spec from its pickled form, on the mesh of this world with the same description."""
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
    meta = spec.tensor_meta if spec.dense else contiguous_meta(spec.shape, spec.dtype)
    return DTensorSpec._intern(spec.mesh_info, layout, placements, spec._shard_order, meta)
