"""What shardwise relies on about process groups that are boxed in script objects."""

import torch.distributed as dist

import shardwise
from shardwise._torch.script_objects import boxed_group_name


def test_the_name_of_a_boxed_group() -> None:
    with shardwise.simulate(2):
        group = dist.group.WORLD
        assert boxed_group_name(group.boxed()) == group.group_name


def test_other_values_have_none() -> None:
    assert boxed_group_name("sum") is None
    assert boxed_group_name(dist.ReduceOp.SUM) is None
