"""What fully_shard communicates, and how much it holds."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise import Shard, distribute_tensor
from shardwise.debug import CommDebugMode
from shardwise.fsdp import Event, fully_shard, schedule
from tests.fsdp.models import batches, loss_of, new_model, shard
from tests.worlds import mesh_of


def even_block() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))


def step(model: nn.Module, mesh: DeviceMesh) -> CommDebugMode:
    x = distribute_tensor(torch.randn(8, 16), mesh, [Shard(0)] * mesh.ndim)
    with CommDebugMode() as counted:
        model(x).sum().backward()
    return counted


def kinds(counted: CommDebugMode) -> list[tuple[str, bool]]:
    return [(collective.kind, collective.moment.backward) for collective in counted.collectives]


@pytest.mark.parametrize("keeps", [False, True])
def test_a_block_makes_one_gather_for_each_pass_and_one_reduction(keeps: bool) -> None:
    with mesh_of(8, names=("dp",)) as mesh:
        block = even_block()
        nbytes = sum(parameter.nbytes for parameter in block.parameters())
        fully_shard(block, mesh=mesh, reshard_after_forward=not keeps)
        step(block, mesh)
        counted = step(block, mesh)
        again = [] if keeps else [("all-gather", True)]
        assert kinds(counted) == [("all-gather", False), *again, ("reduce-scatter", True)]
        # A rank receives all of the parameters but its own eighth.
        assert [collective.received for collective in counted.collectives] == [nbytes * 7 // 8] * len(kinds(counted))


def test_replicas_add_one_all_reduce() -> None:
    with mesh_of(2, 4, names=("replicate", "dp")) as mesh:
        block = fully_shard(even_block(), mesh=mesh, reshard_after_forward=True)
        step(block, mesh)
        expected = [("all-gather", False), ("all-gather", True), ("reduce-scatter", True), ("all-reduce", True)]
        assert kinds(step(block, mesh)) == expected


def test_the_schedule_prefetches_and_holds_two_blocks() -> None:
    with mesh_of(4, names=("dp",)) as mesh:
        model = shard(new_model(blocks=4), mesh)
        for tokens in batches(2):
            loss_of(model, distribute_tensor(tokens, mesh, [Shard(0)])).backward()
        events = [event for event in schedule(model) if event.group != "(root)"]
        one_after_the_other = [0, 1, 2, 3]
        gathered = [event for event in events if event.action in ("gather", "prefetch")]
        assert gathered == [
            *(Event("forward", f"blocks.{i}", "prefetch") for i in one_after_the_other),
            *(Event("backward", f"blocks.{i}", "prefetch") for i in reversed(one_after_the_other)),
        ]
        reduced = [event.group for event in events if event.action == "reduce"]
        assert reduced == [f"blocks.{i}" for i in reversed(one_after_the_other)]
        assert schedule(model).most_gathered() == 3  # two blocks, and the root around them
        assert "backward  blocks.0  reduce" in str(schedule(model))
