"""No world, another world, a part of the world: what is said when a mesh and the ranks do not match."""

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwise
from shardwise import DTensor, Replicate, Shard, distribute_tensor
from shardwise.errors import MeshError, WorldError


def test_no_world() -> None:
    with shardwise.simulate(4):
        mesh = init_device_mesh("cpu", (4,))
        x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    said = (
        "there is no world: torch.distributed is not initialised: "
        "start under torchrun and call init_device_mesh, or use `with shardwise.simulate(8):`"
    )
    for call in (
        lambda: distribute_tensor(torch.ones(4), mesh, [Shard(0)]),
        lambda: DTensor.from_local(torch.ones(4), mesh, [Shard(0)]),
        lambda: shardwise.rand(4, device_mesh=mesh, placements=[Shard(0)]),
        lambda: shardwise.DTensorSpec(mesh, [Shard(0)], x.spec.tensor_meta),
        lambda: x.redistribute(placements=[Replicate()]),
    ):
        with pytest.raises(MeshError) as caught:
            call()
        assert str(caught.value) == said


def test_a_tensor_outside_its_world() -> None:
    with shardwise.simulate(4):
        x = distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (4,)), [Shard(0)])
    assert x.shape == (4,)
    assert "DTensor(f32[4@0] on mesh(0=4)" in repr(x)
    with pytest.raises((MeshError, WorldError)):
        x.full_tensor()


def test_a_mesh_of_a_world_that_has_ended() -> None:
    with shardwise.simulate(4):
        old = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        x = distribute_tensor(torch.arange(4.0), old, [Shard(0), Replicate()])
    with shardwise.simulate(4):
        with pytest.raises(MeshError) as caught:
            distribute_tensor(torch.arange(4.0), old, [Shard(0), Replicate()])
        assert str(caught.value) == (
            "mesh(dp=2, tp=2) belongs to a world that has ended: make it again in this one with init_device_mesh"
        )
        with pytest.raises((MeshError, WorldError)):
            x.full_tensor()
        new = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        y = distribute_tensor(torch.arange(4.0), new, [Shard(0), Replicate()])
        assert y.full_tensor().tolist() == [0, 1, 2, 3]


def test_a_mesh_of_some_of_the_ranks() -> None:
    with shardwise.simulate(4):
        x = distribute_tensor(torch.arange(4.0), DeviceMesh("cpu", [0, 1]), [Shard(0)])
        y = distribute_tensor(torch.arange(4.0), DeviceMesh("cpu", [0, 1, 2, 3]), [Shard(0)])
        with pytest.raises(MeshError, match="on tensors of different meshes"):
            x + y
        assert (x + 1).full_tensor().tolist() == [1, 2, 3, 4]
