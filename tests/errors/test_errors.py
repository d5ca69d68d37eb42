"""Bad input is refused with a text that says what to do: on all ranks alike, before anything is communicated."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwise
from shardwise import DTensor, Replicate, Shard, distribute_tensor
from shardwise.errors import MeshError, ShapeError, ShardwiseError, WorldError
from tests.errors.cases import ROWS, World
from tests.processes.pool import on_processes
from tests.processes.test_redistribute import Collectives


@pytest.fixture
def world():
    with shardwise.simulate(4):
        yield World()


def check(name: str, world: World) -> None:
    row = ROWS[name]
    with Collectives() as called, pytest.raises(ShardwiseError) as caught:
        row.call(world)
    assert type(caught.value) is row.error, name
    assert (caught.value.problem, caught.value.fix) == (row.problem, row.fix), name
    assert str(caught.value) == f"{row.problem}: {row.fix}", name
    assert called.names == [], name


@pytest.mark.parametrize("name", ROWS)
def test_text(name, world) -> None:
    check(name, world)


@on_processes
def test_every_process_says_the_same() -> None:
    world = World()
    for name in ROWS:
        check(name, world)
    dist.barrier()


def test_errors_are_also_the_kind_that_pytorch_would_raise() -> None:
    kinds = {row.error for row in ROWS.values()}
    for kind in kinds:
        assert issubclass(kind, (ValueError, TypeError, RuntimeError))
    assert all(row.fix for row in ROWS.values())


@pytest.mark.xfail(reason="Tensor.__add__ turns every TypeError into one of its own", strict=True)
def test_a_plain_tensor_in_an_operator(world) -> None:
    with pytest.raises(Exception, match="mixes distributed tensors with a plain tensor"):
        world.x + world.whole


# ---- what works ------------------------------------------------------------------------------------------------------


def test_near_misses_that_are_fine(world) -> None:
    assert distribute_tensor(world.whole, world.mesh, [Shard(-2), Shard(-1)]).placements == (Shard(0), Shard(1))
    assert distribute_tensor(world.x, world.mesh, [Shard(0), Replicate()]) is world.x
    assert distribute_tensor(world.x, placements=[Shard(-2), Replicate()]) is world.x
    assert distribute_tensor(world.whole, world.mesh).placements == (Replicate(), Replicate())
    with world.line:
        assert distribute_tensor(world.whole, placements=[Shard(0)]).device_mesh == world.line
        assert DTensor.from_local(world.whole, placements=[Shard(0)]).shape == (24, 4)
        assert shardwise.zeros(4, placements=[Shard(0)]).device_mesh == world.line
        with world.mesh:
            assert shardwise.zeros(4).device_mesh == world.mesh


# ---- worlds ----------------------------------------------------------------------------------------------------------


def test_no_world() -> None:
    with shardwise.simulate(4):
        mesh = init_device_mesh("cpu", (4,))
        spec = distribute_tensor(torch.ones(4), mesh, [Shard(0)])._spec
    said = (
        "there is no world: torch.distributed is not initialised: "
        "start under torchrun and call init_device_mesh, or use `with shardwise.simulate(8):`"
    )
    for call in (
        lambda: distribute_tensor(torch.ones(4), mesh, [Shard(0)]),
        lambda: DTensor.from_local(torch.ones(4), mesh, [Shard(0)]),
        lambda: shardwise.rand(4, device_mesh=mesh, placements=[Shard(0)]),
        lambda: shardwise.DTensorSpec(mesh, [Shard(0)], spec.tensor_meta),
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
        mesh = DeviceMesh("cpu", [0, 1])
        with pytest.raises(MeshError) as caught:
            distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    assert str(caught.value) == (
        "ranks [2, 3] are not in mesh(0=2), whose ranks are [0, 1]: "
        "use a mesh that holds every rank that runs this line"
    )


@on_processes
def test_a_mesh_of_some_of_the_processes() -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    if dist.get_rank() < 2:
        x = distribute_tensor(torch.arange(3.0), mesh, [Shard(0)])
        assert x.full_tensor().tolist() == [0, 1, 2]
    else:
        with pytest.raises(MeshError) as caught:
            distribute_tensor(torch.arange(3.0), mesh, [Shard(0)])
        assert str(caught.value) == (
            f"rank {dist.get_rank()} is not in mesh(0=2), whose ranks are [0, 1]: "
            "use a mesh that holds every rank that runs this line"
        )
    dist.barrier()


# ---- local shapes ----------------------------------------------------------------------------------------------------


def test_local_shapes_that_do_not_fit(world) -> None:
    with pytest.raises(ShapeError) as caught:
        DTensor.from_local(torch.zeros(3, 4), world.mesh, [Shard(0), Replicate()], shape=(8, 4))
    assert str(caught.value) == (
        "the local tensors are no cut of shape [8, 4] by [Shard(dim=0), Replicate()] over mesh(dp=2, tp=2): "
        "rank 0 holds [3, 4] instead of [4, 4], rank 1 holds [3, 4] instead of [4, 4], "
        "rank 2 holds [3, 4] instead of [4, 4], rank 3 holds [3, 4] instead of [4, 4]: "
        "pass the right shape=, cut as torch.chunk does, or use other placements"
    )


@on_processes
def test_local_shapes_that_do_not_fit_on_processes() -> None:
    mesh = World().mesh
    with pytest.raises(ShapeError) as caught:
        DTensor.from_local(torch.zeros(3, 4), mesh, [Shard(0), Replicate()], shape=(8, 4))
    assert f"mesh(dp=2, tp=2): rank {dist.get_rank()} holds [3, 4] instead of [4, 4]: pass" in str(caught.value)
