"""Profilers around a training step: they see the step, and change nothing."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from shardwise import init_device_mesh
from tests.ops.helpers import ranks
from tests.processes.pool import on_processes
from tests.training.models import PLACINGS, cut_batch, loss_of, network, placed
from tests.training.parameters import whole_of


def step(module: nn.Module, optimizer: torch.optim.Optimizer, mesh: Any, seed: int) -> None:
    with record_function("the step"):
        optimizer.zero_grad()
        loss_of(module, cut_batch(seed, mesh)).backward()
        optimizer.step()


def trained(mesh: Any, name: str, profiler: Any = None) -> list[torch.Tensor]:
    module = placed(network(), mesh, PLACINGS[name])
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    for seed in range(4):
        step(module, optimizer, mesh, seed)
        if profiler is not None:
            profiler.step()
    return [whole_of(parameter) for parameter in module.parameters()]


def check_profiler(mesh: Any, name: str, folder: Path) -> None:
    expected = trained(mesh, name)
    plan = schedule(wait=1, warmup=1, active=2)
    options: Any = {"record_shapes": True, "with_stack": True, "with_flops": True, "profile_memory": True}
    with profile(activities=[ProfilerActivity.CPU], schedule=plan, **options) as profiler:
        found = trained(mesh, name, profiler)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
    counts = {event.key: event.count for event in profiler.key_averages()}
    assert counts["the step"] == 2
    assert any(key.startswith("Optimizer.step") for key in counts)
    assert {"aten::mm", "aten::addmm", "aten::linear"} & set(counts)
    assert profiler.key_averages(group_by_input_shape=True).table(row_limit=5)
    profiler.export_chrome_trace(str(folder / "trace.json"))
    assert (folder / "trace.json").stat().st_size


@pytest.mark.parametrize("name", PLACINGS)
def test_a_profiled_step(name: str, tmp_path: Path) -> None:
    with ranks(2, 2) as mesh:
        check_profiler(mesh, name, tmp_path)


@on_processes
def test_a_profiled_step_on_processes(tmp_path: Path) -> None:
    folder = tmp_path / str(torch.distributed.get_rank())
    folder.mkdir()
    check_profiler(init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")), "tensor parallel", folder)


def test_the_older_profiler() -> None:
    with ranks(2, 2) as mesh:
        expected = trained(mesh, "tensor parallel")
        with torch.autograd.profiler.profile() as profiler:
            found = trained(mesh, "tensor parallel")
        assert profiler.key_averages()
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b)


@on_processes
def test_copies_and_files_in_the_middle_of_training_on_processes(tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    module = placed(network(), mesh, PLACINGS["tensor parallel"])
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    step(module, optimizer, mesh, 0)
    path = tmp_path / f"{torch.distributed.get_rank()}.pt"
    torch.save({"module": module.state_dict(), "optimizer": optimizer.state_dict()}, path)
    twin = copy.deepcopy(module)
    step(module, optimizer, mesh, 1)
    for other in (twin, placed(network(), mesh, PLACINGS["tensor parallel"])):
        resumed = torch.optim.AdamW(other.parameters(), lr=0.1)
        saved = torch.load(path, weights_only=True)
        other.load_state_dict(saved["module"])
        resumed.load_state_dict(saved["optimizer"])
        step(other, resumed, mesh, 1)
        for mine, theirs in zip(other.parameters(), module.parameters(), strict=True):
            assert torch.equal(whole_of(mine), whole_of(theirs))
