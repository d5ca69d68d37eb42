"""Training follows the one-device loss, however the model and the batches are cut."""

import pytest

import shardwise
from shardwise import init_device_mesh
from tests.processes.pool import on_processes
from tests.programs.training import PROGRAMS, expected_losses, losses


def follow(name: str, ranks: int) -> None:
    program = PROGRAMS[name]
    sizes = (ranks,) if len(program.axes) == 1 else (2, ranks // 2)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=program.axes)
    assert losses(program, mesh) == pytest.approx(expected_losses(), abs=1e-4)


@pytest.mark.parametrize("name", PROGRAMS)
def test_simulated(name) -> None:
    with shardwise.simulate(8):
        follow(name, 8)


@pytest.mark.parametrize("name", PROGRAMS)
@on_processes
def test_on_processes(name) -> None:
    follow(name, 4)
