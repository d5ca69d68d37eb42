"""The examples run as they are told to, and the notebook shows what its cells print."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs.notebook import NOTEBOOK, run_cells, stored_outputs

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(*command: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # more ranks than GPUs
    done = subprocess.run([*command], capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def differences(printed: str) -> list[float]:
    """The last column of the comparison."""
    rows = [line.split() for line in printed.splitlines()]
    return [float(row[3]) for row in rows if len(row) == 4 and row[0].isdigit()]


@pytest.mark.parametrize(
    "launch",
    [
        pytest.param(["--simulate", "8"], id="simulated"),
        pytest.param(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"], id="torchrun"),
    ],
)
def test_train(launch) -> None:
    script = [str(EXAMPLES / "train.py"), "--steps", "3"]
    command = [*script, *launch] if launch[0] == "--simulate" else [*launch, *script]
    printed = run(sys.executable, *command)
    assert len(differences(printed)) == 3
    assert max(differences(printed)) < 1e-4
    assert "blocks.*.up.weight" in printed
    assert "collectives; each rank receives" in printed


def test_train_is_one_short_file() -> None:
    assert len((EXAMPLES / "train.py").read_text().splitlines()) < 200


def test_tour() -> None:
    assert "equals the same computation on one device" in run(sys.executable, str(EXAMPLES / "tour.py"))


def test_notebook() -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    assert run_cells(notebook) == stored_outputs(notebook), "renew it with: python -m tests.programs.notebook"
