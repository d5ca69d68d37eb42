"""Create distributed tensors: from a global tensor, or shard by shard without building it.

>>> x = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
>>> w = zeros(1 << 20, 1 << 10, device_mesh=mesh, placements=[Shard(0)])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .._torch.dynamo import in_graph
from .._torch.symbols import specialized, symbolic
from ..comm.exchange import broadcast_move, scatter_move
from ..comm.groups import adopt
from ..comm.local_moves import take_slice
from ..comm.on_ranks import from_ranks, on_ranks, shard_outside
from ..comm.redistribute import redistribute_local
from ..errors import InputError, PlacementError, ShapeError
from ..random import Draw
from ..sharding.from_placements import from_placements, sharding_sequence
from ..sharding.memory_order import in_memory_order, is_dense, memory_order, meta_of
from ..sharding.mesh import MeshInfo, current_mesh, mesh_info_of
from ..sharding.placement import AnyShard, Placement, Placements, Replicate
from ..sharding.recording import recorded
from ..sharding.spec import DTensorSpec, contiguous_meta, normalize_placements
from ..world.rank_int import refuse_differing
from .dtensor import DTensor
from .exported import exporting
from .from_local import LOCAL_TENSORS, check_plain_tensor, check_reductions, on_mesh

__all__ = ["distribute_tensor", "empty", "full", "ones", "rand", "randn", "randperm", "zeros"]


@in_graph
def distribute_tensor(
    tensor: Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Shard a global tensor over a mesh.

    The data of the rank at index `src_data_rank` of every axis is sent to the others; with None each rank takes its
    shard from its own tensor. The tensor must be a leaf, and so is the result, with the same `requires_grad`. A tensor
    without gaps in memory keeps its strides, others become row-major. To shard a value inside a computation, so that
    gradients flow through, use `DTensor.from_local` with replicated placements and `redistribute`.

    >>> x = distribute_tensor(torch.arange(24.0).view(6, 4), mesh, [Shard(0), Replicate()])
    >>> x.spec
    f32[6@dp, 4]
    >>> x.to_local().shape
    torch.Size([3, 4])
    """
    tensor = check_plain_tensor(tensor, "distribute_tensor")
    mesh = (
        device_mesh
        if device_mesh is not None
        else tensor.device_mesh
        if isinstance(tensor, DTensor)
        else current_mesh()
    )
    if isinstance(tensor, DTensor):
        return _already_distributed(tensor, mesh, placements)
    if not tensor.is_leaf:
        raise InputError(
            "distribute_tensor got a tensor with a grad_fn",
            "detach it, or keep gradients with DTensor.from_local(tensor, mesh, [Replicate(), ...]).redistribute(...)",
        )
    mesh_info = adopt(mesh)
    normal, order = normalize_placements(mesh_info, placements, tensor.dim())
    meta = specialized(meta_of(tensor)) if mesh_info.simulated else meta_of(tensor)
    spec = DTensorSpec(
        mesh_info.mesh, normal, meta if is_dense(meta) else contiguous_meta(meta.shape, meta.dtype), order
    )
    _check_source(mesh_info, src_data_rank)
    check_reductions(normal, tensor.dtype)
    LOCAL_TENSORS.notify(spec)
    with torch.no_grad():
        local = on_mesh(tensor.detach(), mesh_info)
        if mesh_info.outside:
            local = shard_outside(spec.ndim, spec.dtype, local.device)
        elif src_data_rank is None or local.is_meta:
            local = _own_shard(local, spec)
        else:
            local = _scatter_from(local, spec, src_data_rank)
        local = in_memory_order(local, None if mesh_info.outside else memory_order(spec.tensor_meta))
    result = _wrapped(local, spec)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(result, tensor.requires_grad)  # type: ignore[return-value]
    return result.requires_grad_(tensor.requires_grad)


def _already_distributed(tensor: DTensor, mesh: DeviceMesh, placements: Placements | None) -> DTensor:
    spec = tensor._spec
    if mesh_info_of(mesh) is not spec.mesh_info:
        raise PlacementError(
            f"distribute_tensor got {spec!r}, which is on {spec.mesh_info!r}, not on {mesh_info_of(mesh)!r}",
            "use x.redistribute(mesh, placements) to bring it to another mesh",
        )
    normal, order = normalize_placements(spec.mesh_info, placements, spec.ndim)
    if DTensorSpec(spec.mesh, normal, spec.tensor_meta, order) is not spec:
        raise PlacementError(
            f"distribute_tensor got {spec!r}, which is distributed already, for {list(normal)}",
            "use x.redistribute(placements=...) to change its placements",
        )
    return tensor


def _check_source(mesh_info: MeshInfo, source: int | None) -> None:
    if source is not None and not isinstance(source, int):
        raise InputError(
            f"distribute_tensor got src_data_rank={source!r}",
            "pass an index on every mesh axis, e.g. 0, or None to shard each rank's own tensor",
        )
    if source is not None and not all(0 <= source < size for size in mesh_info.sizes):
        raise PlacementError(
            f"distribute_tensor got src_data_rank={source}, which is no index on every axis of {mesh_info!r}",
            f"use an index in [0, {min(mesh_info.sizes) - 1}]",
        )


def _own_shard(local: Tensor, spec: DTensorSpec) -> Tensor:
    replicated = from_placements(spec.mesh_info.sizes, spec.shape, [Replicate()] * len(spec.mesh_info.sizes))
    shard = on_ranks(spec.mesh_info, lambda at, mine: take_slice(mine, replicated, spec.layout.without_partial(), at))
    return _to_partial(shard(local), spec)


def _scatter_from(local: Tensor, spec: DTensorSpec, source: int) -> Tensor:
    """Return the local shards of the source's data, which is scattered along sharding axes and broadcast along others.

    Axis by axis, in the order in which they shard.
    """
    mesh_info = spec.mesh_info
    done: list[Placement] = [Replicate()] * len(mesh_info.sizes)
    layout = from_placements(mesh_info.sizes, spec.shape, done)
    for axis in sharding_sequence(len(mesh_info.sizes), spec.shard_order):
        placement = spec.placements[axis]
        if isinstance(placement, AnyShard):
            done[axis] = placement
            sharding = [axis for axis, p in enumerate(done) if isinstance(p, AnyShard)]
            order = tuple(
                e._replace(mesh_dims=tuple(a for a in e.mesh_dims if a in sharding)) for e in spec.shard_order
            )
            after = from_placements(mesh_info.sizes, spec.shape, done, order)
            if mesh_info.sizes[axis] > 1:
                local = scatter_move(layout, after, axis, source, mesh_info, spec.dtype)(local)
            layout = after
        elif mesh_info.sizes[axis] > 1:
            local = broadcast_move(axis, source, mesh_info, spec.dtype)(local)
    return _to_partial(local, spec)


def _to_partial(local: Tensor, spec: DTensorSpec) -> Tensor:
    """Return a local shard of `spec`, given that of the same tensor with Partial axes replicated."""
    return redistribute_local(local, spec.cotangent(), spec)


# ---- factories -------------------------------------------------------------------------------------------------------


@in_graph
def zeros(
    *size: object,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
) -> DTensor:
    """Return a distributed tensor of zeros.

    >>> zeros(4, 6, device_mesh=mesh, placements=P("dp", "tp")).spec
    f32[4@dp, 6@tp]
    """
    return _filled(torch.zeros, size, dtype, layout, requires_grad, device_mesh, placements)


@in_graph
def ones(
    *size: object,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
) -> DTensor:
    """Return a distributed tensor of ones.

    >>> ones(4, dtype=torch.int64, device_mesh=mesh, placements=P("tp")).tolist()
    [1, 1, 1, 1]
    """
    return _filled(torch.ones, size, dtype, layout, requires_grad, device_mesh, placements)


@in_graph
def empty(
    *size: object,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
) -> DTensor:
    """Return a distributed tensor whose values are not initialised.

    >>> empty((4, 6), dtype=torch.bfloat16, device_mesh=mesh, placements=P("dp")).spec
    bf16[4@dp, 6]
    """
    return _filled(torch.empty, size, dtype, layout, requires_grad, device_mesh, placements)


@in_graph
def full(
    size: object,
    fill_value: complex,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
) -> DTensor:
    """Return a distributed tensor filled with one value.

    >>> full((4,), 2.5, device_mesh=mesh, placements=P("tp")).tolist()
    [2.5, 2.5, 2.5, 2.5]
    """
    if dtype is None:
        dtype = torch.full((), fill_value).dtype

    def fill(shape: Sequence[int], **options: Any) -> Tensor:
        return torch.full(shape, fill_value, **options)

    return _filled(fill, (size,), dtype, layout, requires_grad, device_mesh, placements)


@in_graph
def rand(
    *size: object,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
) -> DTensor:
    """Return uniform numbers in [0, 1). They depend on the generator's state and the shape, not on the sharding.

    >>> generator = torch.manual_seed(0)
    >>> x = rand(4, device_mesh=mesh, placements=P("tp"))
    >>> generator = torch.manual_seed(0)
    >>> torch.equal(x.full_tensor(), rand(4, device_mesh=mesh, placements=P("dp")).full_tensor())
    True
    """
    return _drawn("uniform_", size, dtype, layout, requires_grad, device_mesh, placements)


@in_graph
def randn(
    *size: object,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
) -> DTensor:
    """Return standard normal numbers. They depend on the generator's state and the shape, not on the sharding.

    >>> generator = torch.manual_seed(0)
    >>> x = randn(4, 4, device_mesh=mesh, placements=P("tp"))
    >>> generator = torch.manual_seed(0)
    >>> torch.equal(x.full_tensor(), randn(4, 4, device_mesh=mesh, placements=P(None, "dp")).full_tensor())
    True
    """
    return _drawn("normal_", size, dtype, layout, requires_grad, device_mesh, placements)


@in_graph
def randperm(
    n: int,
    *,
    requires_grad: bool = False,
    dtype: torch.dtype = torch.int64,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
) -> DTensor:
    """Return the numbers 0 to n - 1 in the order that `torch.randperm` gives them; every rank draws them all.

    >>> sorted(randperm(8, device_mesh=mesh, placements=P("tp")).tolist())
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    return _drawn("randperm", (n,), dtype, layout, requires_grad, device_mesh, placements, ())


def _filled(
    fill: Callable[..., Tensor],
    size: tuple[object, ...],
    dtype: torch.dtype | None,
    layout: torch.layout,
    requires_grad: bool,
    device_mesh: DeviceMesh | None,
    placements: Placements | None,
) -> DTensor:
    spec = _new_spec(size, dtype, layout, device_mesh, placements)
    device = _device(spec.mesh_info)

    def filled() -> Tensor:
        return from_ranks(spec.mesh_info, lambda at: fill(spec.local_shape(at), dtype=spec.dtype, device=device))

    return _made(spec, filled, requires_grad)


def _drawn(
    name: str,
    size: tuple[object, ...],
    dtype: torch.dtype | None,
    layout: torch.layout,
    requires_grad: bool,
    device_mesh: DeviceMesh | None,
    placements: Placements | None,
    arguments: tuple[float, ...] = (0.0, 1.0),
) -> DTensor:
    spec = _new_spec(size, dtype, layout, device_mesh, placements)
    if exporting():
        raise InputError(
            f"cannot export a module that draws numbers of shape {list(spec.shape)} by a factory of shardwise: the "
            "program would hold these numbers, and not draw again",
            "draw with an op on a distributed tensor, e.g. torch.randn_like(x)",
        )

    def numbers() -> Tensor:
        draw = Draw(spec.mesh_info, spec.tensor_meta, _device(spec.mesh_info), None)
        return from_ranks(spec.mesh_info, lambda at: draw.numbers(spec.cotangent().layout, at, name, arguments))

    return _made(spec, lambda: recorded(numbers), requires_grad)


def _made(spec: DTensorSpec, make: Callable[[], Tensor], requires_grad: bool) -> DTensor:
    with torch.no_grad():
        local = _to_partial(make(), spec)
        if spec.mesh_info.outside:  # what was drawn has advanced the generator, as on the ranks of the mesh
            local = shard_outside(spec.ndim, spec.dtype, local.device)
    return _wrapped(local, spec).requires_grad_(requires_grad)


def _wrapped(local: Tensor, spec: DTensorSpec) -> DTensor:
    """Return the tensor with this local shard; while a module is exported, as the result of an op."""
    if not exporting():
        return DTensor.wrap(local, spec)
    shape, stride, _ = spec.tensor_meta
    return DTensor.from_local(local, spec.mesh, spec.placements_alone, shape=shape, stride=stride)


def _new_spec(
    size: tuple[Any, ...],
    dtype: torch.dtype | None,
    layout: torch.layout,
    device_mesh: DeviceMesh | None,
    placements: Placements | None,
) -> DTensorSpec:
    if layout != torch.strided:
        raise InputError(
            f"a DTensor cannot have layout={layout}: only torch.strided tensors can be distributed", "leave layout out"
        )
    mesh_info = adopt(device_mesh if device_mesh is not None else current_mesh())
    given = tuple(size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size)
    refuse_differing("the shape of a DTensor", given)
    shape = torch.Size((specialized if mesh_info.simulated else symbolic)(given))
    if any(length < 0 for length in shape):
        raise ShapeError(f"a DTensor cannot have the shape {list(shape)}", "use sizes that are 0 or more")
    normal_form, order = normalize_placements(mesh_info, placements, len(shape))
    meta = contiguous_meta(shape, dtype if dtype is not None else torch.get_default_dtype())
    check_reductions(normal_form, meta.dtype)
    return DTensorSpec(mesh_info.mesh, normal_form, meta, order)


def _device(mesh_info: MeshInfo) -> torch.device:
    """Return the device that this process uses."""
    if mesh_info.device_type in ("cpu", "meta"):
        return torch.device(mesh_info.device_type)
    return torch.device(mesh_info.device_type, torch.get_device_module(mesh_info.device_type).current_device())
