"""No world, another world, a part of the world: what is said when a mesh and the ranks do not match."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwise
from shardwise import DTensor, Replicate, Shard, distribute_tensor
from shardwise.errors import MeshError, WorldError
from shardwise.testing import assemble


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


SIZED: dict[str, Callable[[Any, Any], object]] = {
    "new_zeros": lambda x, n: x.new_zeros((n,)),
    "new_zeros of a number": lambda x, n: x.new_zeros(n),
    "view": lambda x, n: x.view(n, -1),
    "expand": lambda x, n: x.expand(n, 8),
    "repeat": lambda x, n: x.repeat(n),
    "slice": lambda x, n: x[:n],
    "narrow": lambda x, n: x.narrow(0, 0, n),
    "split": lambda x, n: x.split(n),
    "roll": lambda x, n: x.roll(n, 0),
    "zeros": lambda x, n: shardwise.zeros(n, 2, device_mesh=x.device_mesh),
    "rand": lambda x, n: shardwise.rand((2, n), device_mesh=x.device_mesh),
}


@pytest.mark.parametrize("case", SIZED)
def test_a_size_that_differs_between_ranks(case: str) -> None:
    """A tensor has one global shape, so a size of a local shard is none of its sizes, unless all shards are equal."""
    with shardwise.simulate(3):
        mesh = shardwise.init_device_mesh("cpu", (3,))
        x = shardwise.distribute_tensor(torch.arange(8.0), mesh, [shardwise.Shard(0)])
        for _ in range(2):
            with pytest.raises(WorldError, match=r"differs between simulated ranks: \(3 \| 3 \| 2\): compute it from"):
                SIZED[case](x, x.to_local().shape[0])
        torch.testing.assert_close(assemble(x * x.to_local().shape[0])[-2:], torch.tensor([12.0, 14]))
