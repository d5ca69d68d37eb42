"""Modules in a row share one prepared input, unless that or the input was written since, by any way."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise import DTensor, Replicate, Shard, distribute_tensor
from shardwise.debug import CommDebugMode
from shardwise.parallel import PrepareModuleInput, parallelize_module
from shardwise.world import RankTensor
from tests.worlds import mesh_of


class Total(nn.Module):
    """The sum of the input that this module gets, read without taking its local shard."""

    def forward(self, x: Any) -> float:
        local = x._local_shard if isinstance(x, DTensor) else x
        return float(local.shards[0].sum())


def prepared(module: nn.Module, mesh: Any, layout: Any, use_local: bool) -> nn.Module:
    style = PrepareModuleInput(
        input_layouts=(layout,), desired_input_layouts=(Replicate(),), use_local_output=use_local
    )
    return parallelize_module(module, mesh, style)


def add_by_address(local: Any) -> None:
    """As a kernel that was given an address: no version counter sees it."""
    for shard in local.shards:
        numbers = (ctypes.c_float * shard.numel()).from_address(shard.data_ptr())
        numbers[:] = [number + 1 for number in numbers]


def by_op(x: DTensor) -> None:
    x.add_(1)


def through_data(x: DTensor) -> None:
    x.data.add_(1)


def through_the_same_placements(x: DTensor) -> None:
    x.redistribute(placements=x.placements).add_(1)


def give_other_data(x: DTensor) -> None:
    x.data = x + 1


def in_a_list(x: DTensor) -> None:
    torch._foreach_add_([x], 1.0)


def in_local(x: DTensor) -> None:
    x.to_local().add_(1)


def by_address(x: DTensor) -> None:
    add_by_address(x.to_local())


WRITES = [by_op, through_data, through_the_same_placements, give_other_data, in_a_list, in_local, by_address]


@pytest.mark.parametrize("use_local", [False, True])
@pytest.mark.parametrize("write", WRITES)
def test_an_input_that_was_written_is_prepared_again(write: Callable[[DTensor], None], use_local: bool) -> None:
    with mesh_of(4) as mesh, torch.no_grad():
        total = prepared(Total(), mesh, Shard(0), use_local)
        x = distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)])
        assert total(x) == 64
        write(x)
        assert total(x) == 128


def test_a_plain_input_that_got_other_data_is_prepared_again() -> None:
    with mesh_of(4) as mesh:
        total = prepared(Total(), mesh, Replicate(), use_local=False)
        x: Tensor = RankTensor([torch.ones(8, 8) for _ in range(4)])
        assert total(x) == 64
        x.data = RankTensor([torch.ones(8, 8) + 1 for _ in range(4)])
        assert total(x) == 128


@pytest.mark.parametrize("use_local", [False, True])
def test_what_one_module_writes_by_address_the_next_does_not_get(use_local: bool) -> None:
    class Writes(nn.Module):
        def forward(self, x: Any) -> None:
            add_by_address(x.to_local() if isinstance(x, DTensor) else x)

    with mesh_of(4) as mesh, torch.no_grad():
        writes = prepared(Writes(), mesh, Shard(0), use_local)
        total = prepared(Total(), mesh, Shard(0), use_local)
        x = distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)])
        writes(x)
        assert total(x) == 64


def test_modules_in_a_row_share_one_gather() -> None:
    with mesh_of(4) as mesh, torch.no_grad():
        modules = [prepared(Total(), mesh, Shard(0), use_local=False) for _ in range(3)]
        x = distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)])
        with CommDebugMode() as counter:
            assert [module(x) for module in modules] == [64, 64, 64]
        assert sum(counter.get_comm_counts().values()) == 1
