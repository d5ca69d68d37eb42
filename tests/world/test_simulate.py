import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh

from shardwise import Shard, distribute_tensor
from shardwise.errors import WorldError
from shardwise.sharding.runtime import active_runtime, runtime_of_world
from shardwise.world import RankTensor, current_world, groups_of, map_ranks, register_group, simulate

simulate_module = sys.modules["shardwise.world.simulate"]  # `shardwise.world.simulate` is the function


def tables() -> list[int]:
    world = c10d._world
    return [
        len(t)
        for t in (
            world.pg_map,
            world.pg_names,
            world.pg_group_ranks,
            world.pg_backend_config,
            world.pg_to_tag,
            world.tags_to_pg,
        )
    ]


def known(name: str) -> bool:
    try:
        c10d._resolve_process_group(name)
    except Exception:
        return False
    return True


@pytest.fixture
def gloo(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.new_group([0])
    t = torch.ones(2)
    dist.all_reduce(t)
    assert t.tolist() == [1, 1]
    dist.destroy_process_group()


def test_enter_and_leave() -> None:
    assert current_world() is None
    before, hook = tables(), sys.excepthook
    with simulate(8) as world:
        assert current_world() is world
        assert world.size == dist.get_world_size() == 8
        assert dist.get_rank() == 0
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        names = [mesh.get_group(axis).group_name for axis in ("dp", "tp")]
        names.append(dist.group.WORLD.group_name)
        mesh._flatten("all")
        assert mesh["tp"].size() == 4
        assert all(map(known, names))
        assert sys.excepthook is hook
        assert hash(world) != hash(simulate(8))
    assert current_world() is None
    assert not dist.is_initialized()
    assert tables() == before
    assert not any(map(known, names))
    with pytest.raises(WorldError, match="outside a simulated world"):
        groups_of(names[0])
    with pytest.raises(WorldError, match="outside a simulated world"):
        register_group("x", [(0, 1)])


def test_nested() -> None:
    with simulate(4) as outer:
        outer_name = dist.group.WORLD.group_name
        with simulate(2) as inner:
            assert current_world() is inner
            assert dist.get_world_size() == 2
            assert dist.group.WORLD.group_name != outer_name
            with pytest.raises(WorldError, match="no mesh of the running simulated world"):
                groups_of(outer_name)
            init_device_mesh("cpu", (2,))
        assert current_world() is outer
        assert dist.get_world_size() == 4
        assert groups_of(outer_name) == ((0, 1, 2, 3),)
        x = map_ranks(lambda rank: torch.tensor(float(rank)))
        assert torch.ops._c10d_functional.all_reduce(x, "sum", outer_name).item() == 6
    assert not dist.is_initialized()


def outer_world_works(mesh) -> bool:
    """Whether a mesh of the outer world is known and communicates."""
    x = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
    return x.sum().item() == 28 and torch.equal((x * 2).full_tensor(), torch.arange(0.0, 16.0, 2.0))


def test_a_refused_inner_world_leaves_the_outer_one_running() -> None:
    with simulate(4) as outer:
        mesh = init_device_mesh("cpu", (4,))
        assert outer_world_works(mesh)
        with pytest.raises(WorldError, match="pass 1 or more"), simulate(0):
            pass
        assert current_world() is outer
        assert outer_world_works(mesh)
    assert not dist.is_initialized()


@pytest.mark.parametrize("group_started", [False, True])
def test_an_inner_world_that_cannot_start_leaves_the_outer_one_running(monkeypatch, group_started) -> None:
    start = simulate_module.start_fake_group

    def fail(size: int) -> None:
        if group_started:
            start(size)
        raise OSError("no group today")

    with simulate(4) as outer:
        mesh, runtime, before = init_device_mesh("cpu", (4,)), runtime_of_world(), tables()
        assert outer_world_works(mesh)
        inner = simulate(2)
        monkeypatch.setattr(simulate_module, "start_fake_group", fail)
        for _ in range(2):
            with pytest.raises(OSError, match="no group today"):
                inner.start()
            assert current_world() is outer
            assert dist.get_world_size() == 4
            assert tables() == before
            assert active_runtime() is runtime
            assert outer_world_works(mesh)
        monkeypatch.undo()
        with inner:
            assert dist.get_world_size() == 2
    assert not dist.is_initialized()


def test_the_outer_runtime_is_active_again_after_the_inner_world() -> None:
    with simulate(4):
        runtime = runtime_of_world()
        with simulate(2):
            inner = active_runtime()
            assert inner is runtime_of_world() is not runtime
        assert active_runtime() is runtime
        with simulate(2):
            dist.destroy_process_group()
            with simulate(2):  # a new world drops the runtimes of those that have ended
                pass
        assert active_runtime() is runtime
    assert active_runtime() not in (runtime, inner)


def test_left_on_an_exception() -> None:
    before = tables()

    def fail() -> None:
        with simulate(4), simulate(8):
            init_device_mesh("cpu", (8,))
            raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        fail()
    assert current_world() is None
    assert tables() == before
    assert not dist.is_initialized()


def test_inside_a_live_group(gloo) -> None:
    before, count = tables(), c10d._world.group_count
    with simulate(8):
        assert dist.get_world_size() == 8
        assert dist.get_backend() == "fake"
        init_device_mesh("cpu", (2, 4))
    assert tables() == before
    assert c10d._world.group_count == count
    assert dist.get_backend() == "gloo"
    assert known(gloo.group_name)
    t = torch.ones(2)
    dist.all_reduce(t, group=gloo)
    t = torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(t, "sum", gloo.group_name))
    assert t.tolist() == [1, 1]
    dist.new_group([0])


def test_destroying_the_process_group_inside_ends_the_simulated_groups_alone(gloo) -> None:
    before = tables()
    with simulate(4):
        init_device_mesh("cpu", (2, 2))
        dist.destroy_process_group()
        assert not dist.is_initialized()
    assert tables() == before
    assert known(gloo.group_name)
    assert known(dist.group.WORLD.group_name)
    t = torch.ops._c10d_functional.all_reduce(torch.ones(2), "sum", gloo.group_name)
    assert torch.ops._c10d_functional.wait_tensor(t).tolist() == [1, 1]


def test_start_and_stop() -> None:
    world = simulate(4)
    with pytest.raises(WorldError, match="stopped"):
        world.stop()
    assert world.start() is world
    with pytest.raises(WorldError, match="twice"):
        world.start()
    inner = simulate(2).start()
    with pytest.raises(WorldError, match="the one started last first"):
        world.stop()
    inner.stop()
    world.stop()
    assert current_world() is None
    with world:  # and again
        assert current_world() is world
        assert len(world.groups) == 1
    with pytest.raises(WorldError, match="pass 1 or more"):
        simulate(0)


def test_as_a_decorator() -> None:
    @simulate(4)
    def size(depth: int) -> int:
        return size(depth - 1) if depth else dist.get_world_size()

    assert size(2) == 4
    assert size(0) == 4
    assert not dist.is_initialized()


def test_many_worlds_are_cheap() -> None:
    with simulate(8):
        pass
    start = time.perf_counter()
    for _ in range(20):
        with simulate(64):
            pass
    assert (time.perf_counter() - start) / 20 < 0.02  # about 0.1 ms; the bound leaves room for a busy machine


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_all_ranks_share_the_gpu() -> None:
    with simulate(8):
        mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))
        name = mesh.get_group("tp").group_name
        register_group(name, [range(4), range(4, 8)])
        x = map_ranks(lambda rank: torch.full((3, 2 + rank % 2), float(rank), device="cuda"))
        assert x.device == torch.device("cuda", torch.cuda.current_device())
        x.requires_grad_()
        (x * 2).mean().backward()
        for g in x.grad.shards:
            torch.testing.assert_close(g, torch.full_like(g, 2 / g.numel()))
        x.grad = None
        x.chunk(2)[1].sum().backward()  # makes zeros by size alone, on the device's own autograd thread
        assert [g.sum().item() for g in x.grad.shards] == [2, 3] * 4
        y = torch.ops._c10d_functional.all_reduce(x.detach()[:, :2].contiguous(), "sum", name)
        assert [s[0, 0].item() for s in y.shards] == [6] * 4 + [22] * 4
        z = RankTensor([torch.zeros(4, device="cuda") for _ in range(8)])
        torch.cuda.manual_seed(0)
        drawn = z.uniform_()
        torch.cuda.manual_seed(0)
        assert torch.equal(drawn.shards[7], torch.empty(4, device="cuda").uniform_())
        dist.all_reduce(z)
        dist.barrier(device_ids=[0])
