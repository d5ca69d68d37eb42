"""On real processes: optimizers over several meshes, clipping, deferred reductions, an overflow on one rank."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise import DTensor, accumulate_gradients
from shardwise.debug import CommDebugMode
from tests.processes.pool import on_processes
from tests.processes.reference import mesh_of
from tests.training.models import PLACINGS, batch, cut_batch, loss_of, network, placed
from tests.training.parameters import EVERY_KIND, at_home, leaves, values, whole_of


def on_four() -> dict[str, DeviceMesh]:
    square = mesh_of(2, 2)
    return {"square": square, "submesh": square["a"], "line": init_device_mesh("cpu", (4,), mesh_dim_names=("c",))}


def trained(on: Any, way: dict[str, bool]) -> tuple[list[torch.Tensor], list[float]]:
    params = leaves(EVERY_KIND, values(EVERY_KIND, 0, torch.float64), on)
    optimizer, norms = optim.AdamW(params, lr=0.1, **way), []
    for step in range(3):
        gradients = values(EVERY_KIND, 1 + step, torch.float64)
        for param, gradient, (_, home) in zip(params, gradients, EVERY_KIND, strict=True):
            param.grad = gradient if on is None else at_home(gradient, home, on)
        norm = nn.utils.clip_grad_norm_(params, 1.0)
        assert not isinstance(norm, DTensor)
        norms.append(norm.item())
        optimizer.step()
    return [whole_of(p) for p in params], norms


@on_processes
def test_optimizers_and_clipping() -> None:
    on = on_four()
    for way in ({"foreach": True}, {"foreach": False}, {"fused": True}):
        found, norms = trained(on, way)
        wanted, wanted_norms = trained(None, way)
        assert norms == pytest.approx(wanted_norms, rel=1e-9)
        for many, one in zip(found, wanted, strict=True):
            torch.testing.assert_close(many, one.detach())


@on_processes
def test_an_overflow_on_one_rank_is_known_to_all() -> None:
    on = on_four()
    for home, param in zip(("square", "line"), (0, 7), strict=True):
        params = leaves(EVERY_KIND, values(EVERY_KIND, 0, torch.float32), on)
        optimizer, scaler = optim.SGD(params, lr=1.0), torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.tensor(1.0))
        for i, (gradient, kind) in enumerate(zip(values(EVERY_KIND, 1, torch.float32), EVERY_KIND, strict=True)):
            if i == param:
                gradient.view(-1)[-1] = math.inf
                assert kind[1] is not None
                assert kind[1][0] == home
            params[i].grad = at_home(gradient, kind[1], on)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0
        for whole, p in zip(values(EVERY_KIND, 0, torch.float32), params, strict=True):
            assert torch.equal(whole_of(p), whole)


@on_processes
def test_deferred_reductions() -> None:
    mesh = mesh_of(2, 2)
    one = network()
    for seed in (1, 2, 3):
        loss_of(one, batch(seed)).backward()
    for placing in PLACINGS.values():
        many = placed(network(), mesh, placing)
        for seed in (1, 2, 3):
            with accumulate_gradients(seed != 3):
                loss_of(many, cut_batch(seed, mesh)).backward()
        for p, q in zip(many.parameters(), one.parameters(), strict=True):
            assert p.grad.placements == p.placements
            torch.testing.assert_close(whole_of(p.grad), q.grad)
    many = placed(network(), mesh, PLACINGS["data parallel"])
    *first, last = [loss_of(many, cut_batch(seed, mesh)) for seed in (1, 2, 3)]
    with accumulate_gradients(), CommDebugMode() as counts:
        for loss in first:
            loss.backward()
    assert counts.get_total_counts() == 0
    with CommDebugMode() as counts:
        last.backward()
    assert counts.get_total_counts() == 1
