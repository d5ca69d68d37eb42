"""What one composition saves another one loads, bit by bit: model and optimizer, from 2x2x2 to 8 ranks to one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from shardwise import DeviceMesh, init_device_mesh
from tests.composed.models import batches, full, new_model, new_optimizer, place_on, train
from tests.composed.parallelized import NAMES, fully_sharded, pipelined
from tests.processes.pool import on_processes
from tests.worlds import mesh_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
AXES = ("ep", "cp", "dp", "tp")


def state_of(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    own, optimizer_state = get_state_dict(model, optimizer)
    return {"model": own, "optimizer": optimizer_state}


def values(state: dict[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """All tensors of a state, as global values."""
    found: dict[str, Tensor] = {}
    for key, value in state.items():
        if isinstance(value, dict):
            found |= values(value, f"{prefix}{key}/")
        elif isinstance(value, Tensor):
            found[f"{prefix}{key}"] = full(value).clone()
    return found


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert torch.equal(value, other[key]), key


def save(folder: Path, model: nn.Module, mesh: DeviceMesh, no_dist: bool = True) -> dict[str, Tensor]:
    """Train two steps, save, and return what was saved."""
    optimizer = new_optimizer(model)
    train(model, place_on(mesh), batches(2), optimizer)
    state = state_of(model, optimizer)
    dcp.save(state, checkpoint_id=folder, no_dist=no_dist)
    return values(state)


def load(folder: Path, model: nn.Module, no_dist: bool = True) -> tuple[dict[str, Any], Any]:
    optimizer = new_optimizer(model)
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder, no_dist=no_dist)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return state_of(model, optimizer), optimizer


def check_journey(folder: Path, expected: dict[str, Tensor], model: nn.Module, no_dist: bool = True) -> None:
    """Load what was saved, and save it again."""
    state, _ = load(folder / "one", model, no_dist)
    same(values(state), expected)
    dcp.save(state, checkpoint_id=folder / "two", no_dist=no_dist)


@pytest.mark.parametrize(("sizes", "experts"), [((1, 2, 2, 2), 0), ((2, 1, 2, 2), 4)])
def test_simulated(tmp_path, sizes, experts):
    with mesh_of(*sizes, names=AXES) as mesh:
        expected = save(tmp_path / "one", fully_sharded(mesh, experts), mesh)
    with mesh_of(1, 1, 8, 1, names=AXES) as mesh:
        check_journey(tmp_path, expected, fully_sharded(mesh, experts))
    model = new_model(experts)
    state, optimizer = load(tmp_path / "two", model)
    same(values(state), expected)
    train(model, lambda x: x, batches(1), optimizer)  # it goes on from there


@on_processes
def test_on_processes(tmp_path):
    mesh = init_device_mesh("cpu", (1, 1, 2, 2), mesh_dim_names=AXES)
    expected = save(tmp_path / "one", fully_sharded(mesh), mesh, no_dist=False)
    line = init_device_mesh("cpu", (1, 1, 4, 1), mesh_dim_names=AXES)
    check_journey(tmp_path, expected, fully_sharded(line), no_dist=False)
    state, _ = load(tmp_path / "two", new_model(), no_dist=False)
    same(values(state), expected)


def named_as_in_the_model(name: str) -> str:
    stage = next(stage for stage in NAMES if name.startswith(f"{stage}."))
    return NAMES[stage] + name[len(stage) :]


def test_from_a_pipeline(tmp_path):
    """The stages save under the names of the model they were taken from."""
    with mesh_of(2, 2, 2, names=("pp", "dp", "tp")) as mesh:
        model = pipelined(mesh)
        optimizer = new_optimizer(model)
        for words in batches(2):
            model.step(words[:, :-1], target=words[:, 1:])
            optimizer.step()
            optimizer.zero_grad()
        own, optimizer_state = get_state_dict(model, optimizer)
        state = {
            "model": {named_as_in_the_model(name): value for name, value in own.items()},
            "optimizer": {"state": {named_as_in_the_model(n): each for n, each in optimizer_state["state"].items()}},
        }
        expected = values(state)
        dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    with mesh_of(1, 1, 4, 2, names=AXES) as mesh:
        other = fully_sharded(mesh)
        state = state_of(other, new_optimizer(other))
        state["optimizer"].pop("param_groups")
        dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
        same(values(state), expected)
