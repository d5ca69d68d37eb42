"""Functional collectives and groups by name. A failure names what PyTorch has changed."""

import pytest
import torch
import torch.distributed as dist

from shardwise import simulate
from shardwise._torch import collectives
from shardwise._torch.below_autograd import below_autograd
from shardwise._torch.collectives import group_is_registered, group_named, wait
from shardwise.world import map_ranks


@pytest.mark.parametrize(
    ("name", "args", "results"),
    [
        ("all_gather", (2,), ([0, 1, 2, 3], [0, 1, 2, 3])),
        ("all_reduce", ("sum",), ([2, 4], [2, 4])),
        ("reduce_scatter", ("sum", 2), ([2], [4])),
        ("all_to_all", ([1, 1], [1, 1]), ([0, 2], [1, 3])),
        ("broadcast", (1,), ([2, 3], [2, 3])),
    ],
)
def test_collectives(name, args, results):
    with simulate(2):
        collective = getattr(collectives, name)
        data = map_ranks(lambda rank: torch.tensor([2.0 * rank, 2.0 * rank + 1]))
        with below_autograd():
            moved = wait(collective(data, *args, dist.group.WORLD.group_name))
        assert [shard.tolist() for shard in moved.shards] == list(results)


def test_groups_by_name():
    with simulate(4):
        world = dist.group.WORLD
        assert group_named(world.group_name) is world
        assert group_is_registered(world)
    assert not group_is_registered(world)


def test_below_autograd_records_no_gradient():
    x = torch.ones(2, requires_grad=True)
    with below_autograd():
        assert not (x * 2).requires_grad
    assert (x * 2).requires_grad
