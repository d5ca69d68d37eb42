"""PyTorch's profiler and its DebugMode show ops on distributed tensors and their redistributions."""

import pytest
import torch
from torch import nn
from torch.utils._debug_mode import DebugMode

from shardwise import DTensor, Replicate, Shard, distribute_module, distribute_tensor, init_device_mesh
from shardwise.fsdp import fully_shard
from tests.processes.pool import on_processes
from tests.worlds import mesh_of


def tensors(mesh):
    x = distribute_tensor(torch.randn(8, 16), mesh, [Shard(0)], src_data_rank=None)
    w = distribute_tensor(torch.randn(16, 12), mesh, [Shard(1)], src_data_rank=None)
    return x, w


def profiled(mesh) -> set[str]:
    x, w = tensors(mesh)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        x @ w
    return {event.name for event in profiler.events() if event.name.startswith("shardwise::")}


NAMES = {
    "shardwise::mm f32[8@tp, 16], f32[16, 12@tp]",
    "shardwise::redistribute f32[8@tp, 16] -> f32[8, 16] (all-gather over tp)",
}


def test_the_profiler_shows_readable_names() -> None:
    before = DTensor.__torch_dispatch__
    with mesh_of(4, names=("tp",)) as mesh:
        assert profiled(mesh) == NAMES
    assert DTensor.__torch_dispatch__ is before


@on_processes
def test_the_profiler_on_processes() -> None:
    assert profiled(init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))) == NAMES


def test_profilers_of_both_kinds() -> None:
    with mesh_of(4, names=("tp",)) as mesh:
        x, w = tensors(mesh)
        with torch.autograd.profiler.profile() as profiler:
            x @ w
        assert {event.name for event in profiler.function_events} >= NAMES


def test_buckets_and_fully_shard_have_names() -> None:
    with mesh_of(4, names=("dp",)) as mesh:
        replicated = distribute_module(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), mesh)
        sharded = fully_shard(nn.Linear(4, 4), mesh=mesh)
        x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)], src_data_rank=None)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            replicated(x).square().sum().backward()
            sharded(torch.ones(4, 4)).sum().backward()
    names = {event.name for event in profiler.events()}
    assert "shardwise::all-reduce of 4 gradients" in names
    assert {"shardwise::gather parameters of (root)", "shardwise::reduce gradients of (root)"} <= names


def debugged(mesh) -> list[str]:
    x, w = tensors(mesh)
    with DebugMode() as mode:
        x @ w
        x.redistribute(placements=[Replicate()])
    return mode.debug_string().splitlines()


def test_debug_mode_shows_redistributions() -> None:
    before = DTensor.__torch_dispatch__
    with mesh_of(4, names=("tp",)) as mesh:
        lines = debugged(mesh)
    assert lines[0].strip().startswith("aten::mm(")
    shown = [line for line in lines if "redistribute_input" in line]
    assert len(shown) == 2
    assert all("trace: S(0)->R" in line for line in shown)
    assert DTensor.__torch_dispatch__ is before


@on_processes
def test_debug_mode_on_processes() -> None:
    lines = [line.strip() for line in debugged(init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)))]
    first = next(
        i for i, line in enumerate(lines) if line.startswith("redistribute_input(t: f32[2, 16], trace: S(0)->R)")
    )
    inside = [line.partition("(")[0] for line in lines[first:]]
    assert lines[0].startswith("aten::mm(")
    assert any("all_gather_into_tensor" in name for name in inside)
    assert "aten::mm" in inside


def test_debug_modes_nest() -> None:
    with mesh_of(4, names=("tp",)) as mesh:
        x, _ = tensors(mesh)
        with DebugMode() as outer, DebugMode() as inner:
            x.redistribute(placements=[Replicate()])
        assert "redistribute_input" in outer.debug_string()
        assert "redistribute_input" in inner.debug_string()
        with pytest.raises(ZeroDivisionError), DebugMode():
            1 / 0  # noqa: B018
