"""Ranks that are not in a mesh: they make and use tensors on it without an error, and hold none of their data."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor, rand, randn, zeros
from shardwise.debug import CommDebugMode, draw
from shardwise.errors import MeshError
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from tests.processes.pool import on_processes

MEMBERS = [1, 3]


def mesh_of_two() -> DeviceMesh:
    return DeviceMesh("cpu", MEMBERS, mesh_dim_names=("tp",))


def inside() -> bool:
    return dist.get_rank() in MEMBERS


def same(found: DTensor, expected: torch.Tensor) -> None:
    """The same shape on every rank; the value on the ranks of the mesh, and nothing on the others."""
    assert isinstance(found, DTensor)
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    full = found.detach().full_tensor()
    if inside():
        torch.testing.assert_close(full, expected)
    else:
        assert full.shape == found.to_local().shape == ((0,) if expected.dim() else ())


@on_processes
def test_tensors_are_made() -> None:
    mesh, whole = mesh_of_two(), torch.arange(24.0).view(4, 6)
    for placement in (Shard(0), Shard(1), Replicate(), Partial()):
        same(distribute_tensor(whole, mesh, [placement]), whole)
    same(distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None), whole)
    same(zeros(5, 3, device_mesh=mesh, placements=[Shard(0)]), torch.zeros(5, 3))
    for run_check in (False, True):
        local = torch.full((2, 3), float(dist.get_rank()))
        x = DTensor.from_local(local, mesh, [Shard(0)], run_check=run_check)
        same(x, torch.tensor([1.0, 1, 3, 3]).view(4, 1).expand(4, 3))
    assert "4@tp" in repr(x)
    assert draw(x)


@on_processes
def test_ops() -> None:
    mesh = mesh_of_two()
    whole, other = torch.randn(4, 6), torch.randn(6, 4)
    with CommDebugMode() as comm:
        x, y = distribute_tensor(whole, mesh, [Shard(0)]), distribute_tensor(other, mesh, [Shard(0)])
        for _ in range(2):  # planned, and from the hot path
            same(x + 1, whole + 1)
            same(x @ y, whole @ other)
            same(x.sum(), whole.sum())
            same(x.max(0).values, whole.max(0).values)
            same(x[1:3], whole[1:3])
            same(x.view(24), whole.view(24))
            same(x.split(3, 1)[1], whole[:, 3:])
            same(torch.sort(x, 0).values, whole.sort(0).values)
            same(F.layer_norm(x, (6,)), F.layer_norm(whole, (6,)))
            same(x.redistribute(placements=[Shard(1)], async_op=True), whole)
            same(torch.linalg.pinv(x), torch.linalg.pinv(whole))
        for tensor in torch._foreach_mul([x, y], 2.0):
            assert tensor.to_local().numel() or not inside()
        x.add_(1).mul_(2)
        same(x, (whole + 1) * 2)
        assert torch.equal(x, x)
        if inside():
            assert x.sum().item() == pytest.approx(((whole + 1) * 2).sum().item())
    assert (comm.get_total_counts() > 0) == inside()
    if not inside():
        with pytest.raises(MeshError, match=r"on rank [02], which is not in the mesh of the tensor: the rank"):
            x.sum().item()
        with pytest.raises(MeshError, match="the shape of its result depends on data"):
            torch.nonzero(x)


@on_processes
def test_generators_advance_alike_on_all_ranks() -> None:
    mesh = mesh_of_two()
    torch.manual_seed(0)
    x = rand(4, 6, device_mesh=mesh, placements=[Shard(0)])
    randn(300, 400, device_mesh=mesh, placements=[Shard(0)])
    F.dropout(torch.rand_like(x).normal_(), 0.5).bernoulli_(0.3)
    states = [torch.empty_like(torch.get_rng_state()) for _ in range(4)]
    dist.all_gather(states, torch.get_rng_state())
    assert all(torch.equal(state, states[0]) for state in states)


@on_processes
def test_training() -> None:
    mesh = mesh_of_two()

    def made() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))

    alone, data = made(), torch.randn(4, 6)
    styled = parallelize_module(made(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for model, given in (
        (distribute_module(made(), mesh), distribute_tensor(data, mesh, [Shard(0)])),
        (styled, distribute_tensor(data, mesh, [Replicate()])),
    ):
        expected = made()
        for net, x in ((expected, data), (model, given)):
            optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
            for _ in range(2):
                optimizer.zero_grad()
                net(x).sum().backward()
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
        for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            same(ours, theirs.detach())
    assert len(list(alone.parameters())) == 4
    local = torch.ones(2, 3, requires_grad=True)
    (DTensor.from_local(local, mesh, [Shard(0)]) * 2).sum().full_tensor().backward()
    assert (local.grad is not None) == inside()
