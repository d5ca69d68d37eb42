"""Tensors that change their mesh between real processes. Ranks in neither mesh take no part."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise import CostModel, DTensor, Partial, Replicate, Shard, distribute_tensor, using_cost_model
from shardwise.debug import CommDebugMode
from shardwise.testing import make_dtensor
from tests.comm.mesh_pairs import coordinates, random_pair
from tests.processes.pool import on_processes
from tests.processes.reference import assert_same, cut, mesh_of


def mesh(ranks: list[int], name: str = "x") -> DeviceMesh:
    return DeviceMesh("cpu", ranks, mesh_dim_names=(name,))


def check_shard(found: DTensor, whole: torch.Tensor, other: DeviceMesh, placements: object) -> None:
    """This rank's shard is right; a rank outside the mesh has an empty one."""
    at = coordinates(other).get(dist.get_rank())
    if at is None:
        assert found.to_local().shape == ((0,) if whole.dim() else ())
    else:
        assert_same(found.to_local().detach(), cut(whole, other, placements, at))


@pytest.mark.parametrize("part", range(2))
@on_processes
def test_random_pairs(part: int) -> None:
    for seed in range(1000 + 15 * part, 1015 + 15 * part):
        pair = random_pair(seed, 4)
        (first, second), (source, target) = pair.meshes, pair.placements
        union = {*coordinates(first), *coordinates(second)}
        if dist.get_rank() not in union:
            continue  # need not call
        with using_cost_model(CostModel(staging=1 << 20 if seed % 3 else 256)):
            if dist.get_rank() in coordinates(first):
                x = make_dtensor(pair.value, first, source, seed=seed)
            else:
                x = distribute_tensor(pair.value, first, source, src_data_rank=None)
            y = x.redistribute(second, target, async_op=bool(seed % 2))
            if not any(isinstance(placement, Partial) for placement in target):
                check_shard(y, pair.value, second, target)
            full = y.full_tensor()
            if dist.get_rank() in coordinates(second):
                assert_same(full, pair.value, f"{seed}")


@on_processes
def test_a_rank_in_neither_mesh_need_not_call() -> None:
    """Members may be in different numbers of groups, so that names by counting would not agree."""
    line, other = mesh([0, 1]), mesh([1, 3])
    mesh([1, 3])
    whole = torch.arange(12.0).view(4, 3)
    if dist.get_rank() != 2:
        x = distribute_tensor(whole, line, [Shard(0)], src_data_rank=None)
        for _ in range(2):
            with CommDebugMode() as comm:
                y = x.redistribute(other, [Shard(1)])
            assert comm.get_comm_counts()[torch.ops.c10d_functional.all_to_all_single] == 1
            check_shard(y, whole, other, [Shard(1)])
        check_shard(y.redistribute(line, [Replicate()]), whole, line, [Replicate()])
    else:
        outside = distribute_tensor(whole, line, [Shard(0)], src_data_rank=None).redistribute(other, [Shard(1)])
        assert outside.shape == whole.shape
        check_shard(outside, whole, other, [Shard(1)])


@pytest.mark.parametrize("ranks", [([0, 1, 2], [2, 3]), ([0, 2], [1, 3]), ([0, 1, 2, 3], [3, 1])], ids=str)
@on_processes
def test_gradients_go_back(ranks: tuple[list[int], list[int]]) -> None:
    first, second = (mesh(each) for each in ranks)
    whole, weight = torch.randn(6, 4), torch.randn(6, 4)
    x = distribute_tensor(whole, first, [Shard(0)], src_data_rank=None).requires_grad_()
    y = x.redistribute(second, [Shard(1)])
    w = distribute_tensor(weight, second, [Shard(1)], src_data_rank=None)
    (y * y * w).sum().backward()
    assert x.grad is not None
    assert x.grad.device_mesh == first
    at = coordinates(first).get(dist.get_rank())
    if at is None:
        assert x.grad.to_local().numel() == 0
    else:
        torch.testing.assert_close(x.grad.to_local(), cut(2 * whole * weight, first, [Shard(0)], at))


@on_processes
def test_the_same_ranks_in_another_shape() -> None:
    line, square = mesh_of(4), mesh_of(2, 2)
    whole = torch.randn(8, 6)
    x = distribute_tensor(whole, line, [Shard(0)], src_data_rank=None)
    kept = x.redistribute(square, [Shard(0), Shard(0)])  # every rank has its shard already
    assert kept.to_local().data_ptr() == x.to_local().data_ptr()
    check_shard(x.redistribute(square, [Shard(1), Replicate()]), whole, square, [Shard(1), Replicate()])
    summed = DTensor.from_local(whole, line, [Partial()]).redistribute(square, [Replicate(), Shard(0)])
    check_shard(summed, 4 * whole, square, [Replicate(), Shard(0)])
