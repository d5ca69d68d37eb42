"""Checkpoints of tensors on a GPU: simulated ranks that share it, and one process of NCCL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise import Replicate, Shard, checkpoint, distribute_tensor, init_device_mesh, simulate
from shardwise.checkpoint.background import staging_buffer
from shardwise.errors import CheckpointError
from shardwise.testing import assemble
from shardwise.world import RankTensor

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

PLACEMENTS = {"rows": Shard(0), "columns": Shard(1), "replicated": Replicate()}


@contextmanager
def simulated(ranks: int, folder: Path) -> Iterator[Any]:
    torch.cuda.set_device(0)
    with simulate(ranks):
        yield init_device_mesh("cuda", (ranks,))


@contextmanager
def nccl(ranks: int, folder: Path) -> Iterator[Any]:
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1)
    try:
        yield init_device_mesh("cuda", (1,))
    finally:
        checkpoint.background.finish_background()
        dist.destroy_process_group()


def whole(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(1500 * 700).view(1500, 700).to(dtype)


def state_on(mesh: Any, dtype: torch.dtype) -> dict[str, Any]:
    return {name: distribute_tensor(whole(dtype).cuda(), mesh, [way]) for name, way in PLACEMENTS.items()}


def global_value(tensor: Any) -> torch.Tensor:
    return assemble(tensor).cpu() if isinstance(tensor._local_tensor, RankTensor) else tensor.full_tensor().cpu()


def check(found: dict[str, Any], dtype: torch.dtype) -> None:
    for name, tensor in found.items():
        assert tensor.device.type == "cuda"
        assert torch.equal(global_value(tensor), whole(dtype)), name


def blank(mesh: Any, dtype: torch.dtype) -> dict[str, Any]:
    others = dict(zip(PLACEMENTS, [Shard(1), Replicate(), Shard(0)], strict=True))
    return {
        name: shardwise.zeros(1500, 700, dtype=dtype, device_mesh=mesh, placements=[way])
        for name, way in others.items()
    }


@pytest.mark.parametrize("world", [simulated, nccl])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_save_and_load(tmp_path: Path, world: Any, dtype: torch.dtype) -> None:
    with world(4, tmp_path) as mesh:
        checkpoint.save(state_on(mesh, dtype), tmp_path / "x")
        found = blank(mesh, dtype)
        checkpoint.load(found, tmp_path / "x")
        check(found, dtype)
    plain = {name: torch.zeros(1500, 700, dtype=dtype) for name in PLACEMENTS}
    checkpoint.load(plain, tmp_path / "x")
    assert all(torch.equal(value, whole(dtype)) for value in plain.values())


@pytest.mark.parametrize("world", [simulated, nccl])
@pytest.mark.parametrize("staging", ["buffer", "deferred"])
def test_the_state_may_change(tmp_path: Path, world: Any, staging: Any) -> None:
    """At once, in the order of the stream; after a deferred save as soon as it is staged. The buffer is pinned."""
    checkpoint.release_staging_buffer()
    with world(4, tmp_path) as mesh:
        state = state_on(mesh, torch.float32)
        places = set()
        for step in range(3):
            busy = torch.ones(4096, 4096, device="cuda")
            for _ in range(20):
                busy = busy @ busy  # the copies are not complete when async_save returns
            for tensor in state.values():
                tensor.add_(step)
            saving = checkpoint.async_save({**state, "step": step}, tmp_path / str(step), staging=staging)
            if staging == "deferred":
                saving.staged()
            for tensor in state.values():
                tensor.fill_(-1.0)
            saving.wait()
            places.add(staging_buffer(0).data_ptr())
            found = {**blank(mesh, torch.float32), "step": -1}
            checkpoint.load(found, tmp_path / str(step))
            assert found.pop("step") == step
            for name, tensor in found.items():
                assert torch.equal(global_value(tensor), whole(torch.float32) + step), name
            for tensor in state.values():
                tensor.copy_(distribute_tensor(whole(torch.float32).cuda(), mesh, tensor.placements))
        assert staging_buffer(0).is_pinned()
        assert len(places) == 1
    checkpoint.release_staging_buffer()


def test_training_goes_on_while_the_copy_is_made(tmp_path: Path) -> None:
    """The optimizer's next step waits for a deferred copy."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 2048), nn.BatchNorm1d(2048), nn.Linear(2048, 512)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(64, 512, device="cuda")).square().sum().backward()
        optimizer.step()

    step()
    for turn in range(3):
        wanted = {name: value.clone() for name, value in model.state_dict().items()}
        moments = [optimizer.state[parameter]["exp_avg"].clone() for parameter in model.parameters()]
        checkpoint.async_save({"model": model, "optimizer": optimizer}, tmp_path / str(turn), staging="deferred")
        step()
        fresh = nn.Sequential(nn.Linear(512, 2048), nn.BatchNorm1d(2048), nn.Linear(2048, 512)).cuda()
        state = {"model": fresh, "optimizer": torch.optim.AdamW(fresh.parameters())}
        checkpoint.load(state, tmp_path / str(turn))
        for name, value in fresh.state_dict().items():
            assert torch.equal(value, wanted[name]), name
        for parameter, moment in zip(fresh.parameters(), moments, strict=True):
            assert torch.equal(state["optimizer"].state[parameter]["exp_avg"], moment)


def test_snapshots_beside_a_gpu(tmp_path: Path) -> None:
    """Of ordinary memory, in a process that uses the GPU; not of the GPU's memory, nor of pinned memory."""
    x, y = torch.arange(float(1 << 20)), torch.ones(3, device="cuda")
    saving = checkpoint.async_save({"x": x}, tmp_path / "x", staging="snapshot")
    x.zero_()
    y.add_(1)
    saving.wait()
    found = {"x": torch.zeros(1 << 20)}
    checkpoint.load(found, tmp_path / "x")
    assert torch.equal(found["x"], torch.arange(float(1 << 20)))
    for value in (y, x.pin_memory()):
        with pytest.raises(CheckpointError, match='pass staging="buffer"'):
            checkpoint.async_save({"x": value}, tmp_path / "y", staging="snapshot").wait()


def test_data_of_the_cpu_is_not_pinned(tmp_path: Path) -> None:
    checkpoint.release_staging_buffer()
    checkpoint.async_save({"x": torch.ones(1000)}, tmp_path / "x").wait()
    assert not staging_buffer(0).is_pinned()
    checkpoint.async_save({"x": torch.ones(1000, device="cuda")}, tmp_path / "x").wait()
    assert staging_buffer(0).is_pinned()
    checkpoint.release_staging_buffer()
