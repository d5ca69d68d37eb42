"""Scaled losses and autocast: all ranks skip a step that overflows on one; what is cast is cast alike."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn, optim

from shardwise import DTensor
from shardwise.world import common
from tests.ops.helpers import ranks
from tests.training.models import PLACINGS, batch, cut_batch, network, placed
from tests.training.parameters import EVERY_KIND, Kind, at_home, leaves, meshes, values, whole_of


def scaled_steps(kinds: list[Kind], on: Any, way: dict[str, bool]) -> tuple[list[Any], list[float]]:
    """Four steps, of which the second overflows in one element; the parameters and the scales."""
    params = leaves(kinds, values(kinds, 0, torch.float32), on)
    optimizer, scales = optim.Adam(params, lr=0.1, eps=1e-2, **way), []
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    for step in range(4):
        gradients = values(kinds, 1 + step, torch.float32)
        if step == 1:
            gradients[0].view(-1)[-1] = math.inf  # held by one rank
        for param, gradient, (_, home) in zip(params, gradients, kinds, strict=True):
            gradient = gradient * scaler.get_scale() if step else gradient * 8
            param.grad = gradient if on is None else at_home(gradient, home, on)
        scaler.scale(torch.tensor(1.0))
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(params, 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return [whole_of(p) for p in params], scales


@pytest.mark.parametrize("way", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
def test_a_scaler_on_parameters_of_every_kind(way: dict[str, bool]) -> None:
    wanted, wanted_scales = scaled_steps(EVERY_KIND, None, way)
    with meshes() as on:
        found, scales = scaled_steps(EVERY_KIND, on, way)
    assert scales == wanted_scales == [8.0, 4.0, 4.0, 8.0]
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b.detach())


def train(module: nn.Module, inputs: list[Any], dtype: torch.dtype) -> list[float]:
    optimizer, scaler, losses = optim.AdamW(module.parameters(), lr=1e-2), torch.amp.GradScaler("cpu"), []
    for x in inputs:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype):
            assert module[0](x).dtype is dtype
            loss = module(x).float().square().mean()
        scaler.scale(loss).backward()
        assert all(p.grad.dtype is p.dtype for p in module.parameters())
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", PLACINGS)
def test_training_under_autocast(name: str, dtype: torch.dtype) -> None:
    f32 = torch.float32
    wanted = train(network(dtype=f32), [batch(seed, f32) for seed in range(4)], dtype)
    with ranks(2, 2) as mesh:
        many = placed(network(dtype=f32), mesh, PLACINGS[name])
        found = train(many, [cut_batch(seed, mesh, f32) for seed in range(4)], dtype)
        assert all(isinstance(p.grad, DTensor) and p.grad.placements == p.placements for p in many.parameters())
    assert found == pytest.approx(wanted, rel=2e-2)


def test_autocast_casts_what_it_casts_on_one_device() -> None:
    x = torch.randn(4, 6)
    calls = [
        torch.exp,
        lambda t: t @ t.T,
        lambda t: t.softmax(-1),
        lambda t: nn.functional.layer_norm(t, (6,)),
        torch.sum,
    ]
    with ranks(2, 2) as mesh:
        cut = at_home(x, ("m", PLACINGS["every parameter cut"]("")), {"m": mesh})
        with torch.autocast("cpu", torch.bfloat16):
            for call in calls:
                one, many = call(x), call(cut)
                assert many.dtype is one.dtype
                torch.testing.assert_close(common(many.full_tensor()), one, rtol=2e-2, atol=2e-2)
