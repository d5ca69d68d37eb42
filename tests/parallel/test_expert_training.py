"""Training mixtures whose experts are sharded follows one device: simulated, on processes, and without a style."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.utils.checkpoint

from shardwise import (
    DeviceMesh,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    shard_parameters,
)
from shardwise.debug import CommDebugMode
from shardwise.parallel import ExpertParallel, parallelize_module
from tests.parallel.expert_checks import (
    assert_same,
    by_name,
    loss_of,
    made,
    training_follows_one_device,
    whole,
)
from tests.parallel.mixtures import KINDS
from tests.processes.pool import on_processes
from tests.worlds import mesh_of

# ---- training -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["chosen", "list"])
def test_training(kind: str) -> None:
    with mesh_of(2, 4, names=("dp", "ep")) as mesh:
        training_follows_one_device(kind, mesh)


@on_processes
def test_training_on_processes() -> None:
    for kind in ("chosen", "list"):
        training_follows_one_device(kind, init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep")))


@on_processes
def test_plain_tokens_on_processes() -> None:
    """Rank 1 has no tokens; all tokens go to the experts of one rank; sizes are read once."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
    rank = mesh.get_rank()
    for kind, one_expert in (("chosen", False), ("chosen", True), ("list", False), ("list", True)):
        torch.manual_seed(0)
        alone = KINDS[kind](6, 8, 16)
        model = parallelize_module(copy.deepcopy(alone), mesh, ExpertParallel())
        x, weights = torch.randn(12, 8), torch.rand(12, 2)
        index = torch.rand(12, 6).topk(2).indices
        if one_expert:
            index, weights = torch.full((12, 1), 5), weights[:, :1]
        given = x.clone().requires_grad_()
        expected = alone(given, index, weights)
        expected.square().sum().backward()
        mine = slice(*((0, 5), (5, 5), (5, 11), (11, 12))[rank])
        own = x[mine].clone().requires_grad_()
        found = model(own, index[mine], weights[mine])
        found.square().sum().backward()
        torch.testing.assert_close(found.detach(), expected[mine].detach())
        torch.testing.assert_close(own.grad, given.grad[mine])
        assert_same(by_name(model, lambda p: whole(p.grad)), by_name(alone, lambda p: p.grad))


# ---- without a style ------------------------------------------------------------------------------------------------


def placed_alone(mesh: DeviceMesh) -> None:
    """Sorting, indexing and grouped products of one device, with weights sharded by expert."""
    torch.manual_seed(1)
    sizes = {"experts": 8, "width": 32, "hidden": 64}
    x = torch.randn(29, 32)
    alone, model = made("sorted", **sizes), made("sorted", **sizes)
    expected = alone(x)
    loss_of(expected).backward()
    shard_parameters(model, mesh, lambda name, _: [Shard(0) if "experts" in name else Replicate()])
    tokens = distribute_tensor(x, mesh, [Shard(0)])
    with CommDebugMode() as comm:
        found = model(tokens)
        loss_of(found).backward()
    weights = sum(parameter.numel() * parameter.itemsize for parameter in alone.experts.parameters())
    assert comm.get_total_bytes() < weights // 2, "no expert is gathered"
    torch.testing.assert_close(whole(found[0]), expected[0].detach())
    assert_same(by_name(model, lambda p: whole(p.grad)), by_name(alone, lambda p: p.grad))


def test_by_placement_alone() -> None:
    with mesh_of(4, names=("ep",)) as mesh:
        placed_alone(mesh)


@on_processes
def test_by_placement_alone_on_processes() -> None:
    placed_alone(init_device_mesh("cpu", (4,), mesh_dim_names=("ep",)))
