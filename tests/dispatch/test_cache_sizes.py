"""The bytes that caches of calls count are about those that they keep, for calls on tensors and on lists of them."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable

import pytest
import torch

from shardwise import DTensor, Shard, distribute_tensor, init_device_mesh, simulate
from shardwise.comm.estimate import estimate
from shardwise.dispatch.dispatcher import PLANS
from shardwise.dispatch.hot_path import HOT
from shardwise.sharding.from_placements import in_mesh_order, to_placements
from shardwise.sharding.layout import canonical, plain_dim
from shardwise.sharding.runtime import active_runtime
from shardwise.world import RankTensor


def kept_bytes() -> int:
    for function in (estimate, to_placements, in_mesh_order, canonical, plain_dim):
        function.cache_clear()  # these have bounds of their own
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def on_tensors(tensors: list[DTensor], index: int) -> None:
    size = 300 + index
    local = RankTensor([torch.empty(1).expand(size, 2), torch.empty(1).expand(size, 2)])
    x = DTensor.from_local(local, tensors[0].device_mesh, [Shard(0)])
    x.t() if index % 2 else x.sum(1)


def on_lists(tensors: list[DTensor], index: int) -> None:
    torch._foreach_mul(tensors[: 100 + index], 2.0)


@pytest.mark.parametrize(("call", "count"), [(on_tensors, 400), (on_lists, 60)])
def test_counted_bytes_are_about_the_true_ones(call: Callable[[list[DTensor], int], None], count: int) -> None:
    with simulate(2), torch.no_grad():
        mesh = init_device_mesh("cpu", (2,))
        tensors = [distribute_tensor(torch.ones(2 + i % 50, 3), mesh, [Shard(0)]) for i in range(200)]
        for index in range(10):
            call(tensors, index)
        plans, hot = PLANS.of(active_runtime()), HOT.of(active_runtime())
        entries, counted, counted_hot = len(hot), plans.nbytes + hot.nbytes, hot.nbytes
        tracemalloc.start()
        try:
            before = kept_bytes()
            for index in range(10, 10 + count):
                call(tensors, index)
            assert len(hot) == entries + count
            true, counted = kept_bytes() - before, plans.nbytes + hot.nbytes - counted
            assert true < 1.2 * counted < 12 * true
            plans.clear()  # calls stay in the hot table when their plans have been evicted
            true, counted_hot = kept_bytes() - before, hot.nbytes - counted_hot
            assert true < 1.2 * counted_hot < 6 * true
        finally:
            tracemalloc.stop()
