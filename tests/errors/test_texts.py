"""Bad input is refused with a text that says what to do: on all ranks alike, before anything is communicated."""

import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise import DTensor, Replicate, Shard, distribute_tensor
from shardwise.errors import MixedTensorError, ShapeError, ShardwiseError
from tests.errors.cases import ROWS, World
from tests.processes.pool import on_processes
from tests.processes.test_redistribute import Collectives


@pytest.fixture(scope="module")
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


def test_a_plain_tensor_in_an_operator(world) -> None:
    # Tensor.__add__ and its kin turn every TypeError into one of their own, so it must not be one.
    with pytest.raises(MixedTensorError, match="mixes distributed tensors with a plain tensor"):
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


# ---- local shapes ----------------------------------------------------------------------------------------------------


def test_local_shapes_that_do_not_fit(world) -> None:
    with pytest.raises(ShapeError) as caught:
        DTensor.from_local(torch.zeros(3, 4), world.mesh, [Shard(0), Replicate()], shape=(8, 4))
    assert str(caught.value) == (
        "from_local got local tensors that are not the shards of a tensor of shape [8, 4] with the placements "
        "[Shard(dim=0), Replicate()] over mesh(dp=2, tp=2): "
        "rank 0 holds [3, 4] instead of [4, 4], rank 1 holds [3, 4] instead of [4, 4], "
        "rank 2 holds [3, 4] instead of [4, 4], rank 3 holds [3, 4] instead of [4, 4]: "
        "pass the right shape=, shard as torch.chunk does, or use other placements"
    )


@on_processes
def test_local_shapes_that_do_not_fit_on_processes() -> None:
    mesh = World().mesh
    with pytest.raises(ShapeError) as caught:
        DTensor.from_local(torch.zeros(3, 4), mesh, [Shard(0), Replicate()], shape=(8, 4))
    assert f"mesh(dp=2, tp=2): rank {dist.get_rank()} holds [3, 4] instead of [4, 4]: pass" in str(caught.value)
