"""Saves in the background: what the program may do meanwhile, which memory is used, and what reaches the disk when."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise import Shard, checkpoint, distribute_tensor
from shardwise.checkpoint import background, blocks, staging
from shardwise.checkpoint import saving as saving_module
from shardwise.checkpoint.blocks import BLOCK, BlockReader, BlockWriter
from shardwise.errors import CheckpointError
from tests.processes.pool import on_processes
from tests.processes.reference import mesh_of
from tests.worlds import mesh_of as simulated


class Gate:
    """Holds the copy of a deferred save back until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._opened, copied = threading.Event(), staging.copied

        def wait_and_copy(tensors: list[list[torch.Tensor]]) -> Any:
            assert self._opened.wait(60)
            return copied(tensors)

        monkeypatch.setattr(staging, "copied", wait_and_copy)

    def open(self) -> None:
        self._opened.set()

    def open_later(self) -> None:
        threading.Timer(0.3, self.open).start()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    found = Gate(monkeypatch)
    yield found
    found.open()
    background._Background.saving = None


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 300), nn.BatchNorm1d(300), nn.Linear(300, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, 8)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def test_optimizers_wait_for_a_deferred_copy(tmp_path: Path, gate: Gate) -> None:
    model, optimizer = trained()
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    moments = optimizer.state[model[2].weight]["exp_avg"].clone()
    options = [1, 2]
    state = {"model": model, "optimizer": optimizer, "options": options, "step": 1}
    saving = checkpoint.async_save(state, tmp_path / "x", staging="deferred")
    state["step"] = options[0] = 9
    model(torch.randn(4, 8)).square().sum().backward()  # changes the buffers of the normalization
    gate.open_later()
    optimizer.step()
    saving.wait()
    assert not torch.equal(model[2].weight, wanted["2.weight"])
    found = {"model": trained()[0], "options": [0, 0], "step": 0}
    fresh = torch.optim.AdamW(found["model"].parameters())
    checkpoint.load({**found, "optimizer": fresh}, tmp_path / "x")
    for name, value in found["model"].state_dict().items():
        assert torch.equal(value, wanted[name]), name
    assert torch.equal(fresh.state[found["model"][2].weight]["exp_avg"], moments)
    plain = {"options": [0, 0], "step": 0}
    checkpoint.load(plain, tmp_path / "x")
    assert plain == {"options": [1, 2], "step": 1}


@pytest.mark.parametrize("distributed", [False, True])
def test_a_change_before_a_deferred_copy_is_noticed(tmp_path: Path, gate: Gate, distributed: bool) -> None:
    with simulated(4) as mesh:
        x: Any = torch.ones(1 << 16)
        if distributed:
            x = distribute_tensor(x, mesh, [Shard(0)])
        saving = checkpoint.async_save({"x": x}, tmp_path / "x", staging="deferred")
        x.add_(1)
        gate.open()
        with pytest.raises(CheckpointError, match=r"'x' changed before the state had been copied.*saving\.staged\(\)"):
            saving.wait()
        assert checkpoint.latest(tmp_path) is None
        saving = checkpoint.async_save({"x": x}, tmp_path / "x", staging="deferred")
        saving.staged()
        x.add_(1)
        saving.wait()
    found = {"x": torch.zeros(1 << 16)}
    checkpoint.load(found, tmp_path / "x")
    assert torch.equal(found["x"], torch.full((1 << 16,), 2.0))


@pytest.mark.parametrize("staging", ["buffer", "snapshot"])
def test_optimizers_do_not_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staging: Any) -> None:
    """Nor does `staged`, once the data has been copied."""
    model, optimizer = trained()
    checkpoint.async_save({"model": model}, tmp_path / "x", staging="deferred").wait()
    written, carry_out = threading.Event(), saving_module._carry_out

    def wait_and_carry_out(*args: Any) -> None:
        assert written.wait(60)
        carry_out(*args)

    monkeypatch.setattr(saving_module, "_carry_out", wait_and_carry_out)
    saving = checkpoint.async_save({"model": model}, tmp_path / "y", staging=staging)
    saving.staged()
    optimizer.step()
    assert not saving.done()
    written.set()
    saving.wait()


def test_ways_of_staging_have_names(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"staging='copy': pass one of 'buffer', 'deferred', 'snapshot'"):
        checkpoint.async_save({"a": 1}, tmp_path / "x", staging="copy")  # type: ignore[arg-type]


def test_errors_of_a_deferred_save_surface_at_the_next_call(tmp_path: Path) -> None:
    for value in (object(), torch.eye(3).to_sparse()):
        checkpoint.async_save({"a": value}, tmp_path / "b", staging="deferred")
        with pytest.raises(CheckpointError, match=r"b in the background failed: .*'a' is a "):
            checkpoint.save({"a": 1}, tmp_path / "c")
    assert not (tmp_path / "b").exists()


@on_processes
def test_a_deferred_save_does_not_wait_for_other_ranks(tmp_path: Path) -> None:
    x = distribute_tensor(torch.arange(8.0), mesh_of(4), [Shard(0)])
    checkpoint.save({"x": x}, tmp_path / "0")
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    for step in ("1", "2"):  # the second state has to be planned anew
        if rank == 0:
            store.wait([f"{tmp_path} {step} {other}" for other in (1, 2, 3)])  # until all others have returned
        saving = checkpoint.async_save({"x": x, step: rank}, tmp_path / step, staging="deferred")
        store.set(f"{tmp_path} {step} {rank}", "returned")
        saving.staged()
        x.add_(1)
        saving.wait()
    found = {"x": torch.zeros(8), "2": -1}
    checkpoint.load(found, tmp_path / "2")
    assert torch.equal(found["x"], torch.arange(8.0) + 1)
    assert found["2"] == 0


@on_processes
def test_a_name_that_is_taken_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    if dist.get_rank() == 0:
        (tmp_path / "x").write_text("")
    dist.barrier()
    x = distribute_tensor(torch.arange(8.0), mesh_of(4), [Shard(0)])
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"rank 0: .*x exists and is no checkpoint"):
            checkpoint.save({"x": x}, tmp_path / "x")
        checkpoint.save({"x": x}, tmp_path / "y")


def test_saves_share_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set()
    copied = staging.copied
    monkeypatch.setattr(staging, "copied", lambda x: (threads.add(threading.get_ident()), copied(x))[1])
    for step in range(3):
        checkpoint.async_save({"x": torch.ones(9)}, tmp_path / str(step), staging="deferred").wait()
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_a_forked_process_saves_in_the_background(tmp_path: Path) -> None:
    """It has not inherited the thread."""
    checkpoint.async_save({"x": torch.ones(9)}, tmp_path / "parent")
    child = os.fork()
    if child == 0:
        try:
            checkpoint.async_save({"x": torch.ones(9)}, tmp_path / "child").wait()
        finally:
            os._exit(0)
    for _ in range(600):
        if os.waitpid(child, os.WNOHANG)[0]:
            break
        time.sleep(0.1)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
    background.finish_background()
    assert checkpoint.latest(tmp_path) is not None
    assert (tmp_path / "child" / ".metadata").exists()


def test_memory_is_pinned_for_data_on_a_gpu_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned memory for data of the CPU would make a process use the GPU that used none."""
    checkpoint.release_staging_buffer()
    pinned = []
    empty = torch.empty

    def recorded(*args: Any, **kwargs: Any) -> Any:
        pinned.append(kwargs.pop("pin_memory", False))
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", recorded)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for way in ("buffer", "deferred", "snapshot"):
        checkpoint.async_save({"x": torch.ones(9)}, tmp_path / way, staging=way).wait()
        checkpoint.load({"x": torch.ones(9)}, tmp_path / way)
    assert pinned
    assert not any(pinned)


def test_a_snapshot_of_a_process_that_uses_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: len(tensor) == 5)
    checkpoint.async_save({"x": torch.ones(9)}, tmp_path / "x", staging="snapshot").wait()
    with pytest.raises(CheckpointError, match="pinned memory"):
        checkpoint.async_save({"x": torch.ones(5)}, tmp_path / "y", staging="snapshot").wait()


# ---- what is written -------------------------------------------------------------------------------------------------


def test_the_disk_is_busy_from_the_first_megabytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[tuple[int, int]] = []
    monkeypatch.setattr(blocks, "start_writeback", lambda file, offset, count: requests.append((offset, count)))
    state = {"x": torch.ones(5 << 20), "y": torch.ones(3, 1 << 20).t()}
    checkpoint.save(state, tmp_path / "x", sync=False)
    assert not requests
    checkpoint.save(state, tmp_path / "x")
    assert len(requests) == 4
    for (offset, count), (following, _) in zip(requests, [*requests[1:], (32 * BLOCK, 0)], strict=True):
        assert (offset + count, count) == (following, 8 * BLOCK)


@pytest.mark.parametrize("offset", [0, 8, 3])
@pytest.mark.parametrize("before", [0, 64, 1])
def test_blocks_are_written_from_the_memory_of_tensors(tmp_path: Path, offset: int, before: int) -> None:
    """Whatever its alignment in memory and in the file; only full blocks are not copied first."""
    whole = torch.arange((5 * BLOCK) // 8).view(torch.uint8)
    x = whole[offset : offset + 3 * BLOCK + 1000]
    writer = BlockWriter(tmp_path / "x")
    writer.write(bytes(before))
    writer.write_tensor(x)
    writer.close()
    data = (tmp_path / "x").read_bytes()
    assert data == bytes(before) + bytes(blocks.buffer_of(x))
    assert writer.size == len(data)
    reader = BlockReader(tmp_path / "x")
    assert [reader.checksum(number) for number in range(4)] == writer.sums
    reader.close()


def test_full_blocks_are_not_copied(tmp_path: Path) -> None:
    x = torch.arange(BLOCK // 4)  # two blocks of int64
    writer = BlockWriter(tmp_path / "x")
    writer.write_tensor(x)
    writer.close()
    assert not writer._block.any()
    assert writer.sums[0] != writer.sums[1]
    assert (tmp_path / "x").read_bytes() == bytes(blocks.buffer_of(x))


def test_a_state_of_a_world_that_has_ended(tmp_path: Path, gate: Gate) -> None:
    with shardwise.simulate(4):
        mesh = shardwise.init_device_mesh("cpu", (4,))
        x = distribute_tensor(torch.arange(1 << 16), mesh, [Shard(0)])
        saving = checkpoint.async_save({"x": x}, tmp_path / "x", staging="deferred")
    gate.open()
    saving.wait()
    found = {"x": torch.zeros(1 << 16, dtype=torch.int64)}
    checkpoint.load(found, tmp_path / "x")
    assert torch.equal(found["x"], torch.arange(1 << 16))
