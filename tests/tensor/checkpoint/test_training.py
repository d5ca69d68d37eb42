"""Models and optimizers saved on one mesh go on with the same state on another."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import shardwise
from shardwise import Replicate, init_device_mesh
from tests.processes.pool import on_processes
from tests.processes.reference import mesh_of
from tests.tensor.checkpoint.training import OPTIMIZERS, Training, assert_bitwise, wholes
from tests.training.models import network, placed, tensor_parallel

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
AXES = ("a", "b")


def in_world(sizes: tuple[int, ...]) -> Any:
    return shardwise.simulate(torch.Size(sizes).numel())


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_from_mesh_to_mesh(tmp_path: Any, kind: str) -> None:
    journey = [(2, 2), (4,), (1,), (2, 3)]
    with in_world(journey[0]):
        training = Training(init_device_mesh("cpu", journey[0], mesh_dim_names=AXES), kind)
        for _ in range(2):
            training.step()
        dcp.save(training.state(), checkpoint_id=tmp_path / "0", no_dist=True)
        wanted, next_loss = wholes(training.state()), training.loss().item()
    for stop, sizes in enumerate(journey[1:]):
        with in_world(sizes):
            training = Training(init_device_mesh("cpu", sizes, mesh_dim_names=AXES[: len(sizes)]), kind)
            state = training.state()
            dcp.load(state, checkpoint_id=tmp_path / str(stop), no_dist=True)
            training.load(state)
            assert_bitwise(wholes(training.state()), wanted)
            assert training.loss().item() == pytest.approx(next_loss, rel=1e-6)
            dcp.save(training.state(), checkpoint_id=tmp_path / str(stop + 1), no_dist=True)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps_after_loading_are_those_that_would_have_been(tmp_path: Any, kind: str) -> None:
    with in_world((2, 2)):
        training = Training(init_device_mesh("cpu", (2, 2), mesh_dim_names=AXES), kind)
        training.step()
        dcp.save(training.state(), checkpoint_id=tmp_path, no_dist=True)
        wanted = [training.step() for _ in range(3)]
    with in_world((3,)):
        training = Training(init_device_mesh("cpu", (3,)), kind)
        state = training.state()
        dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
        training.load(state)
        placements = {name: p.placements for name, p in training.model.named_parameters()}
        assert [training.step() for _ in range(3)] == pytest.approx(wanted, rel=1e-5)
        assert placements == {name: p.placements for name, p in training.model.named_parameters()}


@on_processes
def test_on_processes(tmp_path: Any) -> None:
    previous: dict[str, Any] | None = None
    for stop, (sizes, following) in enumerate(itertools.pairwise([(2, 2), (4,), (2, 2)])):
        if previous is None:
            training = Training(mesh_of(*sizes), "AdamW")
            training.step()
            previous, loss = wholes(training.state()), training.loss().item()
        dcp.save(training.state(), checkpoint_id=tmp_path / str(stop))
        training = Training(mesh_of(*following), "AdamW")
        state = training.state()
        dcp.load(state, checkpoint_id=tmp_path / str(stop))
        training.load(state)
        assert_bitwise(wholes(training.state()), previous)
        assert training.loss().item() == pytest.approx(loss, rel=1e-6)


# ---- without files --------------------------------------------------------------------------------------------------


def test_state_dicts_of_modules() -> None:
    with in_world((2, 2)):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=AXES)
        source = placed(network(), mesh, tensor_parallel)
        other = placed(network(), mesh, lambda name: [Replicate(), Replicate()])
        for p in other.parameters():
            p.data.zero_()
        assert not any(other.load_state_dict(source.state_dict()))
        assert other[0].weight.placements == (Replicate(), Replicate())
        assert_bitwise(wholes(other.state_dict()), wholes(source.state_dict()))
        with torch.device("meta"):
            blank = network()
        blank.load_state_dict(source.state_dict(), assign=True)
        assert isinstance(blank[0].weight, nn.Parameter)
        assert blank[0].weight.placements == source[0].weight.placements
        partly = source.state_dict()
        del partly["0.weight"]
        with pytest.raises(RuntimeError, match=r"Missing key.*0\.weight"):
            other.load_state_dict(partly)
        assert other.load_state_dict(partly, strict=False).missing_keys == ["0.weight"]


def test_a_plain_state_dict_into_a_distributed_module() -> None:
    with in_world((2, 2)):
        module = placed(network(), init_device_mesh("cpu", (2, 2), mesh_dim_names=AXES), tensor_parallel)
        for p in module.parameters():
            p.data.zero_()
        with shardwise.implicit_replication():
            module.load_state_dict(network().state_dict())
        assert module[0].weight.placements == tuple(tensor_parallel("0.weight"))
        assert_bitwise(wholes(module.state_dict()), dict(wholes(network().state_dict())))


def test_state_dicts_and_copies_of_optimizers() -> None:
    with in_world((2, 2)):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=AXES)
        first = Training(mesh, "AdamW")
        first.step()
        second = copy.deepcopy(first)
        third = Training(mesh, "AdamW")
        third.model.load_state_dict(first.model.state_dict())
        third.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
        losses = [[training.step() for _ in range(2)] for training in (first, second, third)]
        assert losses[0] == losses[1] == losses[2]
        assert_bitwise(wholes(second.state()), wholes(first.state()))
        assert_bitwise(wholes(third.state()), wholes(first.state()))
