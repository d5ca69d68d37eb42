"""Local and global shapes, by the names and arguments of `torch.distributed.tensor._utils` and `_ops.utils`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..errors import MeshError, ShapeError
from ..sharding.base import DTensorBase
from ..sharding.from_placements import default_order, resolve_placements
from ..sharding.layout import Layout
from ..sharding.memory_order import TensorMeta, memory_order
from ..sharding.placement import AnyShard, Partial, Placement, Replicate, Shard
from ..sharding.spec import DTensorSpec

Coordinate = Sequence[int] | Callable[[int], int] | None


def compute_local_shape_and_global_offset(
    global_shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement], skip_offset: bool = False
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of this rank's local shard, and the global index of its first element.

    >>> compute_local_shape_and_global_offset((8, 4), mesh, [Shard(0)])      # on rank 1 of 2
    ((4, 4), (4, 0))
    """
    return _compute_local_shape_and_global_offset(
        global_shape, mesh.shape, mesh.get_coordinate(), placements, skip_offset
    )


def _compute_local_shape_and_global_offset(
    global_shape: Sequence[int],
    mesh_shape: Sequence[int],
    my_coordinate: Coordinate,
    placements: Sequence[Placement],
    skip_offset: bool = False,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and offset for a coordinate: a list, a function of the axis, or None for a rank outside the mesh."""
    if my_coordinate is None:
        return (0,), ()
    axes = range(len(mesh_shape))
    at = tuple(map(my_coordinate, axes)) if callable(my_coordinate) else tuple(my_coordinate)
    layout = _layout(global_shape, mesh_shape, placements)
    return layout.local_shape(at), () if skip_offset else layout.offset(at)


def compute_local_shape(
    global_shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[int, ...]:
    """Return the shape of this rank's local shard."""
    return compute_local_shape_and_global_offset(global_shape, mesh, placements)[0]


def compute_local_stride(global_stride: Sequence[int], local_shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a local shard whose dims have the memory order of the global tensor."""
    stride, step = [0] * len(local_shape), 1
    for dim in sorted(range(len(local_shape)), key=lambda dim: (global_stride[dim], -dim)):
        if global_stride[dim]:
            stride[dim] = step
            step *= local_shape[dim]
    return tuple(stride)


def compute_local_tensor_info(
    global_tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[list[int], list[int]]:
    """Return the shape and strides of this rank's local shard of a global tensor."""
    shape = compute_local_shape(global_tensor.shape, mesh, placements)
    return list(shape), list(compute_local_stride(global_tensor.stride(), shape))


def compute_global_tensor_info(
    tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[list[int], list[int]]:
    """Return the shape and strides of the global tensor, if all local shards have the size of `tensor`."""
    shape = list(tensor.shape)
    for axis, placement in enumerate(placements):
        if isinstance(placement, AnyShard):
            shape[placement.dim] *= mesh.size(axis)
        elif not isinstance(placement, (Replicate, Partial)):
            raise RuntimeError(f"the placement of axis {axis} is {placement!r}: pass Shard, Replicate or Partial")
    order = memory_order(TensorMeta(torch.Size(tensor.shape), tensor.stride(), tensor.dtype))
    dims = range(len(shape)) if order is None or order.expanded else order.dims
    stride, step = [0] * len(shape), 1
    for dim in reversed(dims):
        stride[dim], step = step, step * max(shape[dim], 1)
    return shape, stride


def compute_global_tensor_shape(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> torch.Size:
    """Return the global shape from this rank's local shape: along each sharding axis, the sum of what its ranks hold.

    The ranks exchange their shapes, so shards may have any sizes.
    """
    sizes = torch.tensor(tuple(shape), device=mesh.device_type)
    for axis, placement in enumerate(placements):
        if isinstance(placement, AnyShard):
            held = [torch.empty_like(sizes) for _ in range(mesh.size(axis))]
            dist.all_gather(held, sizes, group=mesh.get_group(axis))
            table = torch.stack(held)
            for dim in range(len(shape)):
                if dim != placement.dim and not bool((table[:, dim] == table[0, dim]).all()):
                    raise ShapeError(
                        f"the local shapes {table.tolist()} differ in dim {dim}, which is not sharded",
                        "all ranks must hold the same size of it",
                    )
            sizes[placement.dim] = table[:, placement.dim].sum()
    return torch.Size(sizes.tolist())


def normalize_to_torch_size(size: Sequence[int] | Sequence[Sequence[int]] | int) -> torch.Size:
    """Return a size as factories take it, `(2, 3)` or `((2, 3),)`, as a torch.Size."""
    if isinstance(size, int):
        return torch.Size([size])
    if len(size) == 1 and isinstance(size[0], Sequence):
        return torch.Size(size[0])
    return torch.Size(size)  # type: ignore[arg-type]


def try_find_mesh_from_args(op_call: object, args: Sequence[object]) -> DeviceMesh:
    """Return the mesh of the first distributed tensor among an op's arguments."""
    for argument in args:
        for value in argument if isinstance(argument, (list, tuple)) else (argument,):
            if isinstance(value, DTensorBase):
                return value._spec.mesh
            if isinstance(value, DTensorSpec):
                return value.mesh
    raise MeshError(f"{op_call} got no distributed tensor, so there is no mesh", "pass a DTensor")


# ---- of torch.distributed.tensor._ops.utils --------------------------------------------------------------------------


def prod(xs: Iterable[int]) -> int:
    """Return the product of some integers."""
    return math.prod(xs)


def normalize_dim(dim: int, ndim: int) -> int:
    """Return a dim counted from the front."""
    return dim + ndim if dim < 0 else dim


def normalize_dims(dims: int | Sequence[int], ndim: int) -> Sequence[int]:
    """Return dims counted from the front."""
    return (normalize_dim(dims, ndim),) if isinstance(dims, int) else [normalize_dim(dim, ndim) for dim in dims]


def is_tensor_dim_sharded(spec: DTensorSpec, dim: int) -> bool:
    """Return whether some axis shards this dim."""
    return spec.num_shards_map[dim] > 1 or any(isinstance(p, AnyShard) and p.dim == dim for p in spec.placements)


def is_tensor_partial(spec: DTensorSpec) -> bool:
    """Return whether some axis holds operands of a reduction."""
    return any(isinstance(placement, Partial) for placement in spec.placements)


def is_tensor_shardable(shape: Sequence[int], spec: DTensorSpec, allow_unbacked_sharding: bool | None = None) -> bool:
    """Return whether every sharded dim of a tensor of this shape has an element for each shard."""
    return all(shape[dim] >= shards for dim, shards in enumerate(spec.num_shards_map[: len(shape)]) if shards > 1)


def is_tensor_evenly_shardable(shape: Sequence[int], spec: DTensorSpec) -> bool:
    """Return whether the shards of a tensor of this shape have equal sizes."""
    return all(shape[dim] % shards == 0 for dim, shards in enumerate(spec.num_shards_map[: len(shape)]) if shards > 1)


def _layout(global_shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Placement]) -> Layout:
    ndim = len(global_shape)
    normal = tuple(type(p)(p.dim % ndim) if type(p) is Shard else p for p in placements)
    return resolve_placements(tuple(mesh_shape), tuple(global_shape), normal, default_order(normal))[0]
