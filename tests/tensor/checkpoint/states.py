"""A state to save, and ways to cut it."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import shardwise
from shardwise import DTensor, InterleavedShard, P, Replicate, Shard, distribute_tensor
from tests.processes.reference import assert_same, cut

WHOLE: dict[str, Tensor] = {
    "even": torch.arange(48.0).view(8, 6),
    "uneven": torch.arange(35, dtype=torch.float64).view(7, 5) / 3,
    "fewer rows than ranks": torch.tensor([5, -6, 7]),
    "bf16": torch.arange(24).view(4, 6).bfloat16() / 7,
    "bool": torch.arange(10) % 3 == 0,
    "cube": torch.arange(60, dtype=torch.int32).view(4, 3, 5),
    "scalar": torch.tensor(2.5),
    "nothing": torch.empty(0, 4),
    "nothing at all": torch.empty(3, 0, dtype=torch.int64),
}

WAYS = ("first dim", "last dim", "one axis", "interleaved", "replicated", "backwards")


def placements(name: str, mesh: DeviceMesh, way: str) -> Any:
    """The placements of one tensor of the state."""
    shape = WHOLE[name].shape
    replicated: list[Any] = [Replicate()] * mesh.ndim
    if not shape or way == "replicated":
        return replicated
    if way == "first dim":
        return [Shard(0)] * mesh.ndim
    if way == "last dim":
        return [Shard(len(shape) - 1)] * mesh.ndim
    if way == "backwards" and mesh.ndim == 2:
        return P(("b", "a"))
    if way == "interleaved" and shape[0] % 2 == 0:
        return [*replicated[1:], InterleavedShard(0, 2)]
    return [Shard(0), *replicated[1:]]


def state(mesh: DeviceMesh, way: str) -> dict[str, DTensor]:
    """All tensors, sharded over a mesh."""
    return {name: distribute_tensor(whole, mesh, placements(name, mesh, way)) for name, whole in WHOLE.items()}


def blank(mesh: DeviceMesh, way: str) -> dict[str, DTensor]:
    """Tensors of the same shapes, dtypes and cuts, without the values."""
    return {
        name: shardwise.full(
            whole.shape, 1, dtype=whole.dtype, device_mesh=mesh, placements=placements(name, mesh, way)
        )
        for name, whole in WHOLE.items()
    }


def check(tensors: dict[str, DTensor], mesh: DeviceMesh, way: str) -> None:
    """Every rank that this process knows of holds exactly its part, replicas included."""
    assert set(tensors) == set(WHOLE)
    for name, tensor in tensors.items():
        for rank, shard in tensor.shards.items():
            at = tensor._spec.mesh_info.coordinates[rank]
            assert at is not None
            part = cut(WHOLE[name], mesh, placements(name, mesh, way), at)
            assert_same(shard, part, f"{name} on rank {rank}, {way}")
