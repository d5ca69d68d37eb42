"""Experts over one axis, and all parameters replicated over another, follow one device."""

from __future__ import annotations

import pytest
import torch

from shardwise import DeviceMesh, Shard, distribute_tensor, init_device_mesh, replicate
from shardwise.parallel import ExpertParallel, parallelize_module
from tests.parallel.expert_checks import (
    assert_same,
    by_name,
    loss_of,
    made,
    network,
    on_ranks,
    trained,
    whole,
)
from tests.processes.pool import on_processes
from tests.worlds import mesh_of


def follows_one_device(mesh: DeviceMesh) -> None:
    alone, model = network("chosen"), network("chosen")
    expected = trained(alone, lambda t: t)
    parallelize_module(model, mesh, {"mixtures.*.experts": ExpertParallel()})
    replicate(model, mesh=mesh["dp"])
    found = trained(model, lambda t: distribute_tensor(t, mesh, [Shard(0), Shard(0)]))
    assert found == pytest.approx(expected, abs=1e-4)
    assert_same(by_name(model, whole), by_name(alone, lambda p: p.detach()), 1e-4)


def test_training() -> None:
    with mesh_of(2, 4, names=("dp", "ep")) as mesh:
        follows_one_device(mesh)


@on_processes
def test_training_on_processes() -> None:
    follows_one_device(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep")))


@pytest.mark.parametrize("experts_first", [True, False])
def test_local_tokens_and_averaged_gradients(experts_first: bool) -> None:
    """The router is replicated over both axes, the experts over one; gradients of both are averages over all ranks."""
    x = torch.randn(4, 6, 8)
    alone = made("chosen")
    for own in x:
        (loss_of(alone(own)) / 4).backward()
    with mesh_of(2, 2, names=("dp", "ep")) as mesh:
        model = made("chosen")
        parallelize_module(model, mesh["ep"], {"experts": ExpertParallel(gradient_reduction="mean")})
        if experts_first:
            replicate(model.experts, mesh=mesh["dp"])
        replicate(model, mesh=mesh)  # experts stay sharded over ep
        loss_of(model(on_ranks(list(x)))).backward()
        assert_same(by_name(model, lambda p: whole(p.grad)), by_name(alone, lambda p: p.grad))
