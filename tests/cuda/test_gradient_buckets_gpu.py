"""Gradients in buckets on a GPU, where the engine runs hooks in threads of its own. Skipped where there is no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise import Shard, bucket_gradients, distribute_module, distribute_tensor, init_device_mesh, replicate
from shardwise.debug import CommDebugMode

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 8)).cuda()


def gradients(size: Any, local: bool) -> list[torch.Tensor]:
    with shardwise.simulate(4), bucket_gradients(size):
        mesh = init_device_mesh("cuda", (4,), mesh_dim_names=("dp",))
        model = replicate(network(), mesh=mesh) if local else distribute_module(network(), mesh)
        x = distribute_tensor(torch.ones(8, 16, device="cuda").cumsum(0) / 8, mesh, [Shard(0)])
        for _ in range(2):  # the second pass adds to what the first has left
            loss = model(x.to_local() if local else x).square().mean()
            with CommDebugMode() as comm:
                loss.backward()
            assert comm.get_total_counts() == (6 if size is None else 1)
        return [p.grad.shards[3].clone() for p in model.parameters()]


@pytest.mark.parametrize("local", [False, True])
def test_bitwise_as_one_by_one(local: bool) -> None:
    for one, other in zip(gradients(None, local), gradients("25 MiB", local), strict=True):
        assert torch.equal(one, other)


def test_as_on_one_device() -> None:
    model = network()
    for _ in range(2):
        model(torch.ones(8, 16, device="cuda").cumsum(0) / 8).square().mean().backward()
    for p, found in zip(model.parameters(), gradients("25 MiB", local=False), strict=True):
        torch.testing.assert_close(found, p.grad)
