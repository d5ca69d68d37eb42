"""A plain PyTorch program whose parameters and inputs are DTensors follows the one-device loss."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor, nn

import shardwise
from shardwise import DeviceMesh, Placement, Replicate, Shard, distribute_tensor, init_device_mesh
from tests.processes.pool import on_processes
from tests.programs.language_model import new_model, train

Place = Callable[[Tensor], list[Placement]]


def last_dim_over_tp(parameter: Tensor) -> list[Placement]:
    return [Replicate(), Shard(parameter.dim() - 1)]


def first_dim_over_all(parameter: Tensor) -> list[Placement]:
    return [Shard(0)]


# What is cut: the mesh, every parameter, every batch (5 rows, so unevenly).
PROGRAMS: dict[str, tuple[tuple[int, ...], Place, list[Placement]]] = {
    "replicated, data parallel": ((2, 2), lambda p: [Replicate(), Replicate()], [Shard(0), Replicate()]),
    "data parallel x cut weights": ((2, 2), last_dim_over_tp, [Shard(0), Replicate()]),
    "batch over both axes": ((2, 2), last_dim_over_tp, [Shard(0), Shard(0)]),
    "every parameter over 4": ((4,), first_dim_over_all, [Shard(0)]),
}


def distribute_parameters(model: nn.Module, mesh: DeviceMesh, place: Place) -> None:
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            module.register_parameter(name, nn.Parameter(distribute_tensor(parameter.data, mesh, place(parameter))))


def follow(program: str) -> None:
    """The sharded losses are the one-device losses."""
    sizes, place, batch = PROGRAMS[program]
    expected = train(new_model())
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[: len(sizes)])
    model = new_model()
    distribute_parameters(model, mesh, place)
    assert train(model, lambda tensor: distribute_tensor(tensor, mesh, batch)) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("program", PROGRAMS)
def test_simulated(program) -> None:
    with shardwise.simulate(4):
        follow(program)


@pytest.mark.parametrize("program", ["data parallel x cut weights", "every parameter over 4"])
@on_processes
def test_on_processes(program) -> None:
    follow(program)
