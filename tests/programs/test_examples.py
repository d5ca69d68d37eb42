"""The examples run with their options, and the notebook shows what its cells print."""

import json
import os
import re
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


def test_examples_are_short_files() -> None:
    assert len((EXAMPLES / "train.py").read_text().splitlines()) < 200
    assert len((EXAMPLES / "llama.py").read_text().splitlines()) < 340


LARGEST = re.compile(r"the largest difference of a loss in (\d+) steps is (\S+)")


def test_llama(tmp_path) -> None:
    """Trained on simulated ranks, then resumed on processes, on another mesh; the losses are those of one device."""
    script = [str(EXAMPLES / "llama.py"), "--width", "16", "--length", "12", "--checkpoint", str(tmp_path), "--compare"]
    sparse = ["--experts", "4", "--ep", "2", "--steps", "4"]
    first = run(sys.executable, *script, *sparse, "--simulate", "8", "--dp", "2", "--tp", "2", "--stop", "2")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    second = run(sys.executable, *launch, *script, *sparse)
    assert "8 ranks as ep x cp x dp x tp = 2 x 1 x 2 x 2" in first
    assert "resumed after step 2" in second
    for printed in (first, second):
        steps, difference = LARGEST.search(printed).groups()
        assert int(steps) == 2
        assert float(difference) < 1e-4
        assert "optimizer" in printed
    assert re.search(r"dp +all-gather +\d+ +[\d,]+", first)
    assert re.search(r"ep +all-to-all +\d+ +[\d,]+", second)


def test_tour() -> None:
    assert "equals the same computation on one device" in run(sys.executable, str(EXAMPLES / "tour.py"))


def test_notebook() -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    assert run_cells(notebook) == stored_outputs(notebook), "renew it with: python -m tests.programs.notebook"
