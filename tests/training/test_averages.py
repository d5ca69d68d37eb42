"""Averages of a model: exponential, stochastic, in one op for all parameters or one by one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import swa_utils

from shardwise import DTensor
from tests.ops.helpers import ranks
from tests.training.models import PLACINGS, batch, cut_batch, loss_of, network, placed
from tests.training.parameters import whole_of

WAYS: dict[str, dict[str, Any]] = {
    "equal weights": {},
    "ema": {"avg_fn": swa_utils.get_ema_avg_fn(0.9)},
    "ema in one op": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)},
    "swa in one op": {"multi_avg_fn": swa_utils.get_swa_multi_avg_fn()},
}


def averaged(module: nn.Module, inputs: list[Any], way: dict[str, Any]) -> swa_utils.AveragedModel:
    optimizer = optim.SGD(module.parameters(), lr=0.1)
    schedule = swa_utils.SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    average = swa_utils.AveragedModel(module, **way)
    for x in inputs:
        optimizer.zero_grad()
        loss_of(module, x).backward()
        optimizer.step()
        schedule.step()
        average.update_parameters(module)
    return average


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("name", PLACINGS)
def test_averages_of_parameters(name: str, way: dict[str, Any]) -> None:
    wanted = averaged(network(), [batch(seed) for seed in range(3)], way)
    with ranks(2, 2) as mesh:
        many = placed(network(), mesh, PLACINGS[name])
        found = averaged(many, [cut_batch(seed, mesh) for seed in range(3)], way)
        for a, b, p in zip(found.parameters(), wanted.parameters(), many.parameters(), strict=True):
            assert isinstance(a, DTensor)
            assert a.placements == p.placements
            torch.testing.assert_close(whole_of(a), b.detach())
        torch.testing.assert_close(whole_of(found(cut_batch(9, mesh))), wanted(batch(9)).detach())
        again = swa_utils.AveragedModel(many, **way)
        again.load_state_dict(found.state_dict())
        assert again.n_averaged.item() == 3


def test_statistics_of_an_average() -> None:
    one = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)).double()
    batches = [batch(seed) for seed in range(3)]
    with ranks(2, 2) as mesh:
        many = placed(copy.deepcopy(one), mesh, PLACINGS["every parameter cut"])
        swa_utils.update_bn([cut_batch(seed, mesh) for seed in range(3)], many)
        swa_utils.update_bn(batches, one)
        for name, buffer in one.named_buffers():
            torch.testing.assert_close(whole_of(many.get_buffer(name)), buffer)
