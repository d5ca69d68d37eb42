"""Functions on tensors by the names and arguments of private modules of `torch.distributed.tensor`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..comm.cost import links_of
from ..comm.estimate import estimate
from ..comm.redistribute import redistribute_local, start_redistribute
from ..dispatch.modes import explicit, warning_of_communication
from ..extend import local_map
from ..extend.local_function import InPlacements, OutPlacements
from ..sharding.placement import Placement, Replicate, Shard
from ..sharding.spec import DTensorSpec
from ..tensor.creation import distribute_tensor
from ..tensor.dtensor import DTensor

from_local = DTensor.from_local


def _shard_tensor(
    full_tensor: Tensor, placements: Sequence[Placement], device_mesh: DeviceMesh | None = None
) -> DTensor:
    """Distribute a global tensor that every rank holds, without communication."""
    return distribute_tensor(full_tensor, device_mesh, placements, src_data_rank=None)


def redistribute_local_tensor(
    local_tensor: Tensor,
    current_spec: DTensorSpec,
    target_spec: DTensorSpec,
    *,
    async_op: bool = False,
    use_graph_based_transform: bool | None = None,
    is_explicit: bool = True,
) -> Tensor:
    """Redistribute a local tensor from one spec to another, and return the new local tensor."""
    if async_op:
        return start_redistribute(local_tensor, current_spec, target_spec)()
    return redistribute_local(local_tensor, current_spec, target_spec)


def redistribute_cost(current_spec: DTensorSpec, target_spec: DTensorSpec) -> float:
    """Return the estimated microseconds of a redistribution; infinity between different meshes."""
    if current_spec.mesh_info is not target_spec.mesh_info:
        return float("inf")
    links = links_of(current_spec.mesh_info)
    return 1e6 * estimate(current_spec.layout, target_spec.layout, current_spec.dtype.itemsize, links)


@contextmanager
def use_min_cost_redistribution_plan(enabled: bool = True) -> Iterator[None]:
    """Do nothing: the planner always takes the cheapest plan."""
    yield


@contextmanager
def disable_redistribute_transform_optimization(disabled: bool = True) -> Iterator[None]:
    """Do nothing: the planner always takes the cheapest plan."""
    yield


def _get_flattened_mesh_by_layout_impl(*args: object, **kwargs: object) -> None:
    """Return None: groups of several axes are made when a mesh is adopted, not looked up among flattened meshes."""


def ExplicitRedistributionContext(
    enable: bool = True, strict: bool = False, mode: str = "raise"
) -> AbstractContextManager[None]:
    """Return `shardwise.explicit()`: an op that needs communication raises, or with `mode="warn"` warns."""
    return warning_of_communication() if enable and mode == "warn" else explicit(enable)


def _local_map_wrapped(
    func: Callable[..., object],
    out_placements: OutPlacements,
    in_placements: InPlacements,
    in_grad_placements: InPlacements,
    device_mesh: DeviceMesh | None,
    redistribute_inputs: bool,
    *args: object,
    **kwargs: object,
) -> object:
    """Apply `local_map` to a function and call it."""
    mapped = local_map(
        func,
        out_placements,
        in_placements,
        in_grad_placements,
        device_mesh,
        redistribute_inputs=redistribute_inputs,
    )
    return mapped(*args, **kwargs)


# ---- collectives along one axis --------------------------------------------------------------------------------------


def mesh_broadcast(
    tensor: Tensor, mesh: DeviceMesh, mesh_dim: int = 0, async_op: bool = False, *, group_src: int = 0
) -> dist.Work | None:
    """Broadcast a plain tensor along one mesh axis, in place."""
    return dist.broadcast(tensor, group=mesh.get_group(mesh_dim), async_op=async_op, group_src=group_src)


def mesh_scatter(
    output: Tensor,
    scatter_list: list[Tensor],
    mesh: DeviceMesh,
    mesh_dim: int = 0,
    async_op: bool = False,
    *,
    group_src: int = 0,
) -> dist.Work | None:
    """Scatter plain tensors along one mesh axis into `output`."""
    group = mesh.get_group(mesh_dim)
    given = scatter_list if dist.get_rank(group) == group_src else None
    return dist.scatter(output, given, group=group, async_op=async_op, group_src=group_src)


def shard_dim_alltoall(input: Tensor, gather_dim: int, shard_dim: int, mesh: DeviceMesh, mesh_dim: int) -> Tensor:
    """Gather one dim of a local tensor along a mesh axis and shard another."""
    placements: list[Placement] = [Replicate()] * mesh.ndim
    placements[mesh_dim] = Shard(gather_dim)
    tensor = DTensor.from_local(input, mesh, placements)
    placements[mesh_dim] = Shard(shard_dim)
    return tensor.redistribute(placements=placements).to_local()


def pad_tensor(tensor: Tensor, pad_dim: int, pad_size: int) -> Tensor:
    """Return the tensor with zeros appended to one dim."""
    if pad_size == 0:
        return tensor
    shape = list(tensor.shape)
    shape[pad_dim] = pad_size
    return torch.cat([tensor, tensor.new_zeros(shape)], pad_dim)


def unpad_tensor(tensor: Tensor, pad_dim: int, pad_size: int) -> Tensor:
    """Return the tensor without the last `pad_size` elements of one dim."""
    return tensor if pad_size == 0 else tensor.narrow(pad_dim, 0, tensor.size(pad_dim) - pad_size)
