"""The example model with dropout follows one loss: that of one device, on any mesh, under any plan."""

from __future__ import annotations

import pytest
import torch

import shardwise
from examples.train import GPT, batches, train
from shardwise import distribute_tensor, init_device_mesh
from shardwise.random import draw
from tests.processes.pool import on_processes
from tests.programs.training import LENGTH, PROGRAMS, ROWS, Program

STEPS = 4


def new_model() -> GPT:
    torch.manual_seed(0)
    return GPT(width=16, heads=4, layers=2, length=LENGTH, dropout=0.1)


def losses(program: Program, ranks: int) -> list[float]:
    sizes = (ranks,) if len(program.axes) == 1 else (2, ranks // 2) if ranks > 1 else (1, 1)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=program.axes)
    model = program.cut(new_model(), mesh)
    torch.manual_seed(1)
    with program.around():
        return train(model, batches(STEPS, ROWS, LENGTH), lambda tensor: distribute_tensor(tensor, mesh, program.batch))


def on_one_device() -> list[float]:
    model = new_model()
    torch.manual_seed(1)
    return train(model, batches(STEPS, ROWS, LENGTH))


@pytest.mark.parametrize(("name", "ranks"), [*((name, 8) for name in PROGRAMS), ("dp x tp", 1), ("dp x tp", 4)])
def test_drawn_as_global_tensor_it_follows_one_device(name: str, ranks: int) -> None:
    with shardwise.simulate(ranks):
        assert losses(PROGRAMS[name], ranks) == pytest.approx(on_one_device(), abs=1e-4)


@pytest.mark.parametrize("name", ["dp x tp", "every parameter sharded"])
def test_by_index_it_follows_one_rank(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw, "GLOBAL_DRAW_LIMIT", 0)
    found = []
    for ranks in (1, 4, 8):
        with shardwise.simulate(ranks):
            found.append(losses(PROGRAMS[name], ranks))
    assert found[1] == pytest.approx(found[0], abs=1e-4)
    assert found[2] == pytest.approx(found[0], abs=1e-4)
    assert found[0] != pytest.approx(on_one_device(), abs=1e-4)


@on_processes
def test_on_processes() -> None:
    assert losses(PROGRAMS["dp x tp"], 4) == pytest.approx(on_one_device(), abs=1e-4)
