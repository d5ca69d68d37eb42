"""The specs of sharded parameters: the data axis shards what is left by the other axes."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import InputError
from ..sharding.mesh import MeshInfo
from ..sharding.placement import InterleavedShard, Placement, Replicate, Shard, ShardOrderEntry
from ..sharding.spec import DTensorSpec, TensorMeta
from .axes import DataAxes, joined_mesh, mesh_without
from .memory import view_of


def placements_on(spec: DTensorSpec, mesh_info: MeshInfo) -> tuple[list[Placement], tuple[ShardOrderEntry, ...]]:
    """Return placements and shard order of a spec on a mesh with further axes, over which it is replicated."""
    names = spec.mesh_info.names
    placements: list[Placement] = [Replicate()] * len(mesh_info.sizes)
    for name, placement in zip(names, spec.placements, strict=True):
        placements[mesh_info.names.index(name)] = placement
    order = tuple(
        ShardOrderEntry(entry.tensor_dim, tuple(mesh_info.names.index(names[axis]) for axis in entry.mesh_dims))
        for entry in spec.shard_order
    )
    return placements, order


def _meta_with_first(shape: torch.Size, dim: int, dtype: torch.dtype) -> TensorMeta:
    """Return the metadata of a tensor that is stored with one dim first, then the others in order."""
    _, strides, _ = view_of((shape[dim], *shape[:dim], *shape[dim + 1 :]), dim, 0)
    return TensorMeta(shape, strides, dtype)


def spec_of_plain(parameter: Tensor, axes: DataAxes, dim: int) -> DTensorSpec:
    """Return the spec of a plain parameter that is sharded over the data axis."""
    placements: list[Placement] = [Replicate()] * axes.shard_axis + [Shard(dim)]
    shape = parameter.shape
    return DTensorSpec(axes.mesh_info.mesh, placements, _meta_with_first(shape, dim, parameter.dtype))


def spec_of_distributed(
    name: str, old: DTensorSpec, axes: DataAxes, dim: int
) -> tuple[DTensorSpec, DTensorSpec | None]:
    """Return the spec of a distributed parameter sharded over the data axis as well, and the spec without that axis."""
    for axis in axes.inside(old.mesh_info) or ():
        if not isinstance(old.placements[axis], Replicate):
            raise InputError(
                f"fully_shard over {axes.mesh_info!r} got the parameter {name!r} as {old!r}, which is not replicated "
                f"over {old.mesh_info.names[axis]}",
                "pass a mesh over whose axes parameters are replicated",
            )
    if any(isinstance(p, InterleavedShard) and p.dim == dim for p in old.placements):
        raise InputError(
            f"fully_shard cannot shard dim {dim} of the parameter {name!r}, {old!r}, which is sharded in blocks there",
            "let shard_placement_fn return another dim for it, or make its blocks separate parameters",
        )
    meta = _meta_with_first(old.shape, dim, old.dtype)
    other = _without_data_axes(old, axes, meta)
    if other is None:
        placements: list[Placement] = [Replicate()] * axes.shard_axis + [Shard(dim)]
        return DTensorSpec(axes.mesh_info.mesh, placements, meta), None
    mesh_info = joined_mesh(axes, other.mesh_info)
    placements, order = placements_on(other, mesh_info)
    shard_axis = mesh_info.names.index(axes.mesh_info.names[-1])
    placements[shard_axis] = Shard(dim)
    inner = {entry.tensor_dim: entry.mesh_dims for entry in order}
    inner[dim] = (*inner.get(dim, ()), shard_axis)
    new_order = tuple(ShardOrderEntry(d, inner[d]) for d in sorted(inner))
    return DTensorSpec(mesh_info.mesh, placements, meta, new_order), other


def _without_data_axes(old: DTensorSpec, axes: DataAxes, meta: TensorMeta) -> DTensorSpec | None:
    others = mesh_without(axes, old.mesh_info)
    if others is None:
        return None
    names = old.mesh_info.names
    placements = [p for name, p in zip(names, old.placements, strict=True) if name in others.names]
    order = tuple(
        ShardOrderEntry(entry.tensor_dim, tuple(others.names.index(names[axis]) for axis in entry.mesh_dims))
        for entry in old.shard_order
    )
    return DTensorSpec(others.mesh, placements, meta, order)
