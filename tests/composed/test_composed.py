"""Parallelisms together equal one device: 8 steps of AdamW with clipping, on batches that no axis divides."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise import Shard, distribute_tensor, init_device_mesh, replicate
from shardwise.fsdp import fully_shard
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from tests.composed.models import STEPS, alone, batches, check, new_optimizer, same_parameters
from tests.composed.parallelized import NAMES, fully_sharded, pipelined, replicated
from tests.processes.pool import on_processes
from tests.worlds import mesh_of

WAYS = {"fully_shard": fully_sharded, "replicate": replicated}
# By what, on which sizes of (ep, cp, dp, tp), with how many experts.
SIMULATED = [
    ("fully_shard", (1, 1, 4, 2), 0),
    ("fully_shard", (1, 2, 2, 2), 0),
    ("fully_shard", (2, 1, 2, 2), 4),
    ("replicate", (2, 1, 4, 1), 4),
]
ON_PROCESSES = [
    ("fully_shard", (1, 1, 2, 2), 0),
    ("fully_shard", (1, 2, 2, 1), 0),
    ("fully_shard", (1, 2, 1, 2), 0),
    ("fully_shard", (2, 1, 2, 1), 4),
    ("fully_shard", (2, 1, 1, 2), 4),
    ("replicate", (2, 1, 2, 1), 4),
]
AXES = ("ep", "cp", "dp", "tp")


@pytest.mark.parametrize(("way", "sizes", "experts"), SIMULATED)
def test_simulated(way, sizes, experts):
    with mesh_of(*sizes, names=AXES) as mesh:
        check(WAYS[way](mesh, experts), mesh, experts)


def test_sixty_four_simulated_ranks():
    with mesh_of(1, 4, 4, 4, names=AXES) as mesh:
        check(fully_sharded(mesh), mesh, steps=1)


@pytest.mark.parametrize(("way", "sizes", "experts"), ON_PROCESSES)
@on_processes
def test_on_processes(way, sizes, experts):
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=AXES)
    check(WAYS[way](mesh, experts), mesh, experts)


def check_pipeline(mesh):
    model = pipelined(mesh)
    optimizer = new_optimizer(model)
    losses, expected = alone()
    found = []
    for words in batches():
        found.append(model.step(words[:, :-1], target=words[:, 1:]).item())
        model.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(found, losses, rtol=1e-4, atol=1e-4)
    named = {}
    for stage, module in NAMES.items():
        named |= {stage + name[len(module) :]: value for name, value in expected.items() if name.startswith(module)}
    assert len(found) == STEPS
    same_parameters(model, named)


def test_a_simulated_pipeline():
    with mesh_of(2, 2, 2, names=("pp", "dp", "tp")) as mesh:
        check_pipeline(mesh)


@pytest.mark.parametrize("sizes", [(2, 2, 1), (2, 1, 2)])
@on_processes
def test_a_pipeline_on_processes(sizes):
    check_pipeline(init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp", "tp")))


@pytest.mark.parametrize("apply", [fully_shard, replicate])
def test_a_slice_that_another_mesh_has_too(apply):
    """mesh["tp"] of both meshes is one mesh, which was first sliced from the other one."""
    with mesh_of(4, 2, names=("other", "tp")) as other:
        distribute_tensor(torch.ones(4), other["tp"], [Shard(0)])
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        apply(model, mesh=mesh["dp"])
        assert model[0].weight.device_mesh == mesh
        model(torch.ones(5, 4)).sum().backward()
        assert model[1].weight.grad.placements == model[1].weight.placements
