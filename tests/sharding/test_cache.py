"""Caches bounded in bytes, and caches that belong to a world."""

import gc
import sys
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwise import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh, simulate
from shardwise.comm.cost import CostModel, links_of, using_cost_model
from shardwise.comm.groups import adopt
from shardwise.comm.redistribute import redistribute_local
from shardwise.sharding.cache import Cache, cached_within
from shardwise.sharding.mesh import mesh_info_of
from shardwise.sharding.runtime import WorldCache, WorldState, active_runtime, all_runtimes, runtime_of_world

# ---- one cache --------------------------------------------------------------------------------------------------


def small_cache():
    return Cache(max_bytes=100, size_of=lambda key, value: 10)


def test_bytes_stay_bounded():
    cache = small_cache()
    for key in range(1000):
        cache[key] = str(key)
        assert cache.nbytes <= 110
        assert len(cache) * 10 == cache.nbytes
    assert cache.get(999) == "999"


def test_what_is_used_stays_and_what_is_not_goes():
    cache = small_cache()
    cache["used"], cache["unused"] = 1, 2
    for key in range(100):
        cache[key] = key
        assert cache.get("used") == 1
    assert cache.get("unused") is None


def test_an_entry_counts_once():
    cache = Cache(max_bytes=100, size_of=lambda key, value: value)
    for value in (10, 20, 30, 5):
        cache["again"] = value
        assert (len(cache), cache.nbytes) == (1, value)
    for key in range(5):
        cache[key] = 10
    assert not cache.recent
    assert (len(cache), cache.nbytes) == (6, 55)
    assert cache.get("again") == 5  # used in the older generation
    cache[0] = 20  # and set there
    assert (len(cache), cache.nbytes) == (6, 65)
    assert len({*cache.recent, *cache.older}) == 6


def test_the_recent_generation_is_one_dict():
    cache = small_cache()
    recent = cache.recent
    for key in range(100):
        cache[key] = key
    cache.clear()
    assert cache.recent is recent
    assert (len(cache), cache.nbytes) == (0, 0)


def test_results_of_a_function_stay_bounded():
    calls = []

    @cached_within(max_bytes=10_000, size_of=lambda result: 8 * len(result))
    def up_to(stop):
        calls.append(stop)
        return tuple(range(stop))

    assert up_to(3) == up_to(3) == (0, 1, 2)
    assert calls == [3]
    for stop in range(200):
        assert up_to(stop) == tuple(range(stop))
        assert up_to.cache.nbytes <= 10_000 + 8 * stop
    assert up_to(3) == (0, 1, 2)
    assert calls.count(3) == 2


# ---- the caches of a world --------------------------------------------------------------------------------------

NUMBERS: WorldCache[str, int] = WorldCache("numbers", 1 << 10)
LISTS = WorldState(list)


def test_each_world_has_its_own_state():
    with simulate(2):
        outer = runtime_of_world()
        NUMBERS.of(outer)["x"] = 1
        LISTS.of(outer).append(1)
        with simulate(2):
            inner = runtime_of_world()
            assert active_runtime() is inner is not outer
            assert NUMBERS.of(inner).get("x") is None
            assert LISTS.of(inner) == []
            assert {outer, inner} <= set(all_runtimes())
        assert runtime_of_world() is outer is active_runtime()
        assert NUMBERS.of(outer).get("x") == 1
        outer.clear_caches()
        assert NUMBERS.of(outer).get("x") is None
        assert LISTS.of(outer) == [1]  # state that is no cache stays
    assert outer not in all_runtimes()
    assert active_runtime() is not outer


def test_an_entry_is_made_once_for_each_world():
    made = []

    def make() -> int:
        made.append(1)
        return len(made)

    for world in (1, 2):
        with simulate(2):
            assert [NUMBERS.entry(runtime_of_world(), "x", make) for _ in range(2)] == [world, world]


def test_a_mesh_of_an_outer_world_is_not_of_an_inner_one():
    with simulate(2):
        outer = init_device_mesh("cpu", (2,))
        info = adopt(outer)
        assert info.runtime is runtime_of_world()
        with simulate(2):
            inner = init_device_mesh("cpu", (2,))
            assert adopt(inner) is not info
            assert adopt(inner).runtime is not info.runtime
            assert adopt(outer) is adopt(inner)  # equal meshes of one world
        assert adopt(outer) is info


def test_another_cost_model_clears_the_caches():
    with simulate(2):
        info = adopt(init_device_mesh("cpu", (2,)))
        before = links_of(info)
        assert links_of(info) is before
        with using_cost_model(CostModel(latency=1.0)):
            assert links_of(info).ring.latency == (1.0,)
        assert links_of(info) == before


# ---- nothing outlives its world ---------------------------------------------------------------------------------


def redistribute_in_a_world(ranks=4):
    """A weak reference to the MeshInfo of a world in which a tensor was redistributed."""
    with simulate(ranks):
        mesh = init_device_mesh("cpu", (ranks,))
        x = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
        info = x._spec.mesh_info
        moved = redistribute_local(x._local_tensor, x._spec, x._spec.replicated())
        assert moved.shards[0].tolist() == list(range(8))
        return weakref.ref(info)


def test_redistribution_does_not_keep_a_world():
    info = redistribute_in_a_world()
    gc.collect()
    assert info() is None


def test_a_destroyed_world_goes_when_the_next_begins():
    with_mesh = []
    for _ in range(2):
        dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", (4,))
            with_mesh.append(weakref.ref(adopt(mesh)))
            assert active_runtime() is with_mesh[-1]().runtime
        finally:
            dist.destroy_process_group()
    del mesh
    gc.collect()
    assert with_mesh[0]() is None


@pytest.mark.parametrize("again", [False, True])
def test_a_simulated_world_goes_when_the_program_has_destroyed_its_group(again):
    def program():
        with simulate(4):
            first = weakref.ref(adopt(init_device_mesh("cpu", (4,))))
            dist.destroy_process_group()
            if again:
                dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
                return first, weakref.ref(adopt(init_device_mesh("cpu", (4,))))
            return (first,)

    worlds = program()
    gc.collect()
    assert [world() for world in worlds] == [None] * len(worlds)
    assert active_runtime() not in all_runtimes()


def test_programs_do_not_keep_a_world():
    def program():
        with simulate(4):
            mesh = init_device_mesh("cpu", (4,))
            x = distribute_tensor(torch.arange(16.0).view(4, 4), mesh, [Shard(0)]).requires_grad_()
            y = x.redistribute(placements=[Shard(1)])
            z = DTensor.from_local(torch.ones(4, 4), mesh, [Partial()]).redistribute(placements=[Replicate()])
            ((y @ z).relu() + 1).sum().backward()
            torch._foreach_mul([x.detach(), y.detach()], 2.0)
            assert x.grad.placements == (Shard(0),)
            return weakref.ref(mesh_info_of(mesh))

    info = program()
    gc.collect()
    assert info() is None


def test_a_thousand_worlds_in_a_row_do_not_grow_memory():
    for _ in range(20):
        redistribute_in_a_world(2)
    gc.collect()
    objects, blocks = len(gc.get_objects()), sys.getallocatedblocks()
    for _ in range(1000):
        redistribute_in_a_world(2)
    gc.collect()
    assert len(gc.get_objects()) - objects < 100
    assert sys.getallocatedblocks() - blocks < 2000
