"""A ring holds two blocks of keys and values, whatever the number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from shardwise import DTensor, Shard
from shardwise.nn import attention_over_sequence
from shardwise.testing.live_bytes import LiveBytes
from tests.ops.helpers import ranks
from tests.worlds import fake_group

LENGTH, HEADS, WIDTH = 256, 4, 16


def peaks(mesh: Any, method: Any) -> tuple[float, float]:
    """What forward and backward need besides their operands, in keys and values of a rank (a block)."""
    count = mesh.size()
    local = torch.randn(1, HEADS, LENGTH // count, WIDTH)
    shards = [DTensor.from_local(local.clone(), mesh, [Shard(2)]).requires_grad_() for _ in range(3)]
    block = 2 * local.numel() * 4
    with attention_over_sequence(method):
        F.scaled_dot_product_attention(*shards).sum().backward()  # plans are made
        for shard in shards:
            shard.grad = None
        with LiveBytes() as counted:
            output = F.scaled_dot_product_attention(*shards)
            forward = counted.peak
            gradient = torch.ones_like(output)
            counted.start()
            output.backward(gradient)
    return forward / block, counted.peak / block


@pytest.mark.parametrize("count", [4, 8])
def test_a_rank_holds_two_blocks(count: int) -> None:
    with fake_group(count):
        mesh = init_device_mesh("cpu", (count,))
        forward, backward = peaks(mesh, "ring")
        # two blocks, the output, that of the block, and numbers for each query
        assert forward < 3.5
        # two blocks; gradients of the own block, of the present one, and of one on its way; queries, outputs, gradients
        assert backward < 9


def test_a_ring_needs_a_fraction_of_what_a_gather_needs() -> None:
    with fake_group(8):
        mesh = init_device_mesh("cpu", (8,))
        ring, gathered = peaks(mesh, "ring"), peaks(mesh, "gather")
        assert ring[0] < 2.5 / 8 * gathered[0]
        assert ring[1] < 2.5 / 8 * gathered[1]


def test_simulated_ranks_hold_two_blocks_each() -> None:
    with ranks(8) as mesh:
        local = torch.randn(1, HEADS, LENGTH // 8, WIDTH)
        shards = [DTensor.from_local(local, mesh, [Shard(2)]) for _ in range(3)]
        with attention_over_sequence("ring"), LiveBytes() as counted:
            F.scaled_dot_product_attention(*shards)
    assert counted.peak < 8 * 3.5 * 2 * local.numel() * 4
