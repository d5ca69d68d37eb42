"""Names, the `latest` pointer, retention, replacement, and what killed saves leave behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise import Shard, checkpoint, distribute_tensor
from shardwise.checkpoint import folders
from shardwise.checkpoint import saving as saving_module
from shardwise.errors import CheckpointError
from tests.processes.pool import on_processes
from tests.processes.reference import mesh_of
from tests.worlds import mesh_of as simulated


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def step_in(path: Path) -> int:
    state = {"step": 0}
    checkpoint.load(state, path)
    return state["step"]


def test_the_pointer_names_the_last_one(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path) is None
    assert checkpoint.latest(tmp_path / "nowhere") is None
    for step in (3, 10, 7):
        checkpoint.save({"step": step}, tmp_path / f"step-{step}")
        assert checkpoint.latest(tmp_path) == tmp_path / f"step-{step}"
    assert step_in(tmp_path) == 7
    assert step_in(tmp_path / "step-10") == 10
    for damage in ("step-99\n", "../step-3", "", "\0"):
        (tmp_path / "latest").write_text(damage)
        assert checkpoint.latest(tmp_path) == tmp_path / "step-7"
    (tmp_path / "latest").unlink()
    assert step_in(tmp_path) == 7


def test_retention_deletes_the_oldest(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / ".step-0.saving").mkdir()
    (tmp_path / ".step-0.deleting").mkdir()
    (tmp_path / ".step-0.latest").write_text("step-0")
    for step in range(5):
        checkpoint.save({"step": step}, tmp_path / f"step-{step}", keep=3)
    assert names(tmp_path) == ["latest", "notes", "step-2", "step-3", "step-4"]
    checkpoint.save({"step": 5}, tmp_path / "step-5")
    assert names(tmp_path) == ["latest", "notes", "step-2", "step-3", "step-4", "step-5"]
    with pytest.raises(CheckpointError, match="keep=0"):
        checkpoint.save({"step": 6}, tmp_path / "step-6", keep=0)


def test_a_checkpoint_is_replaced(tmp_path: Path) -> None:
    for step in range(3):
        checkpoint.save({"step": step}, tmp_path / "x")
        assert step_in(tmp_path / "x") == step
    assert names(tmp_path) == ["latest", "x"]


def test_a_kill_between_two_renames(tmp_path: Path) -> None:
    """The moment at which a replaced checkpoint has no name: the earlier one is found, and put back."""
    checkpoint.save({"step": 1}, tmp_path / "x")
    (tmp_path / "x").rename(tmp_path / ".x.replaced")
    assert checkpoint.latest(tmp_path) == tmp_path / ".x.replaced"
    assert step_in(tmp_path / "x") == 1
    checkpoint.save({"step": 2}, tmp_path / "x")
    assert step_in(tmp_path / "x") == 2
    assert names(tmp_path) == ["latest", "x"]


@pytest.mark.parametrize("moment", ["write_file", "_write_index", "commit"])
def test_a_failure_leaves_the_previous_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    checkpoint.save({"step": 1}, tmp_path / "a")
    checkpoint.save({"step": 2}, tmp_path / "b")

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(saving_module, moment, fail)
    for call in (checkpoint.save, lambda *args: checkpoint.async_save(*args).wait()):
        with pytest.raises(CheckpointError, match="No space left on device"):
            call({"step": 3}, tmp_path / "b")
    monkeypatch.undo()
    assert step_in(tmp_path) == 2
    assert names(tmp_path) == ["a", "b", "latest"]


@on_processes
def test_a_failure_of_one_rank(tmp_path: Path) -> None:
    mesh = mesh_of(4)
    x = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
    checkpoint.save({"x": x}, tmp_path / "a")
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 3:

            def fail(*args: Any, **kwargs: Any) -> None:
                raise OSError("No space left on device")

            patch.setattr(saving_module, "write_file", fail)
        with pytest.raises(CheckpointError, match="rank 3: No space left on device"):
            checkpoint.save({"x": x + 1}, tmp_path / "b")
        saving = checkpoint.async_save({"x": x + 1}, tmp_path / "b")
        with pytest.raises(CheckpointError, match=r"in the background failed.*rank 3: No space left on device"):
            checkpoint.save({"x": x}, tmp_path / "c")
        assert saving.done()
    dist.barrier()  # the first rank has cleaned up
    assert names(tmp_path) == ["a", "latest"]
    dist.barrier()
    checkpoint.save({"x": x + 2}, tmp_path / "c", keep=1)
    y = shardwise.zeros(8, device_mesh=mesh, placements=[Shard(0)])
    assert checkpoint.load({"x": y}, tmp_path).name == "c"
    assert torch.equal(y.full_tensor(), torch.arange(8.0) + 2)


def test_states_that_cannot_be_planned(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"two values of the state have the name 'a\.b'"):
        checkpoint.save({"a": {"b": 1}, "a.b": 2}, tmp_path / "x")
    with pytest.raises(CheckpointError, match=r"'x' is a torch\.sparse_coo tensor"):
        checkpoint.save({"x": torch.eye(3).to_sparse()}, tmp_path / "x")
    with pytest.raises(CheckpointError, match="cannot be named 'latest'"):
        checkpoint.save({"x": 1}, tmp_path / "latest")
    assert names(tmp_path) == []


# ---- in the background -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("staging", ["buffer", "snapshot"])
def test_the_state_may_change_at_once(tmp_path: Path, staging: Any) -> None:
    whole = torch.arange(float(1 << 20)).view(1024, -1)
    with simulated(4) as mesh:
        x = distribute_tensor(whole, mesh, [Shard(1)])
        for step in range(3):
            saving = checkpoint.async_save({"x": x, "step": step}, tmp_path / str(step), staging=staging)
            x.add_(1)
        assert (tmp_path / "1").exists(), "the next call waits for the one before"
        assert saving.wait() == tmp_path / "2"
        assert saving.done()
    for step in range(3):
        state = {"x": torch.zeros(whole.shape), "step": -1}
        checkpoint.load(state, tmp_path / str(step))
        assert state["step"] == step
        assert torch.equal(state["x"], whole + step)
    checkpoint.release_staging_buffer()


def test_the_staging_memory_is_used_again(tmp_path: Path) -> None:
    from shardwise.checkpoint.background import staging_buffer

    places = set()
    for step in range(3):
        checkpoint.async_save({"x": torch.ones(1000) * step}, tmp_path / str(step), staging="buffer").wait()
        places.add(staging_buffer(0).data_ptr())
    assert len(places) == 1
    assert staging_buffer(0).nbytes < 4200
    checkpoint.release_staging_buffer()
    assert staging_buffer(0).nbytes == 0


@pytest.mark.parametrize("staging", ["buffer", "snapshot"])
def test_errors_surface_at_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staging: Any) -> None:
    checkpoint.save({"a": 1}, tmp_path / "a")
    for call in (
        lambda: checkpoint.save({"a": 2}, tmp_path / "c"),
        lambda: checkpoint.async_save({"a": 2}, tmp_path / "c"),
        lambda: checkpoint.load({"a": 2}, tmp_path / "a"),
    ):
        checkpoint.async_save({"a": object()}, tmp_path / "b", staging=staging)
        with pytest.raises(CheckpointError, match=r"saving .*b in the background failed: .*'a' is a builtins.object"):
            call()
        call()
        checkpoint.background.finish_background()
    assert "b" not in names(tmp_path)


def test_errors_that_no_call_has_raised_are_printed_at_exit(tmp_path: Path) -> None:
    program = f"from shardwise import checkpoint; checkpoint.async_save({{'a': object()}}, {str(tmp_path / 'x')!r})"
    paths = str(Path(__file__).parents[2] / "src")
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert "x in the background failed" in done.stderr
    assert "'a' is a builtins.object" in done.stderr


def test_shared_memory_is_copied(tmp_path: Path) -> None:
    """A forked process sees what is written to shared memory later."""
    x = torch.arange(float(1 << 20)).share_memory_()
    with pytest.raises(CheckpointError, match="shared or pinned memory"):
        checkpoint.async_save({"x": x}, tmp_path / "x", staging="snapshot").wait()
    saving = checkpoint.async_save({"x": x}, tmp_path / "x")
    x.zero_()
    saving.wait()
    found = {"x": torch.zeros(1 << 20)}
    checkpoint.load(found, tmp_path / "x")
    assert torch.equal(found["x"], torch.arange(float(1 << 20)))


@on_processes
def test_collectives_meanwhile(tmp_path: Path) -> None:
    """A save in the background does not meet the collectives of the program."""
    x = distribute_tensor(torch.ones(1 << 16), mesh_of(4), [Shard(0)])
    for step in range(3):
        checkpoint.async_save({"x": x}, tmp_path / str(step))
        for _ in range(20):
            total = torch.ones(4) * dist.get_rank()
            dist.all_reduce(total)
            assert total.tolist() == [6.0] * 4
    checkpoint.background.finish_background()


def test_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint.save({"x": torch.ones(1 << 20)}, tmp_path / "x")
    assert capsys.readouterr().err == ""
    checkpoint.save({"x": torch.ones(1 << 20)}, tmp_path / "x", progress=True)
    checkpoint.load({"x": torch.ones(1 << 20)}, tmp_path / "x", progress=True)
    shown = capsys.readouterr().err
    assert "saving [##############################] 100% of 0.00 GB" in shown
    assert "loading [" in shown


def test_kills() -> None:
    """A handful of what `python -m tests.checkpoint.killing --kills 100` does."""
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root / "src"), str(root)])
    command = [sys.executable, "-m", "tests.checkpoint.killing", "--kills", "3", "--seed", "7"]
    done = subprocess.run(
        command,
        cwd=root,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("3 kills")
    assert folders.LATEST == "latest"
