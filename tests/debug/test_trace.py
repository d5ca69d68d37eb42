"""Traces for chrome://tracing and ui.perfetto.dev: modelled for simulated ranks, measured on processes."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardwise import CostModel, DeviceMesh, Replicate, Shard, distribute_tensor, init_device_mesh, using_cost_model
from shardwise.debug import explain, merge_traces, trace
from tests.processes.pool import on_processes
from tests.worlds import mesh_of


def step(mesh: DeviceMesh) -> None:
    x = distribute_tensor(torch.randn(8, 16), mesh, [Shard(0), Shard(1)], src_data_rank=None)
    w = distribute_tensor(torch.randn(16, 12), mesh, [Replicate(), Shard(0)], src_data_rank=None).requires_grad_()
    (x @ w).relu().sum().backward()


def spans(path: Path) -> list[dict]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]


def by_name(events: list[dict], name: str) -> list[dict]:
    return [event for event in events if event["name"] == name]


def tracks(path: Path) -> set[str]:
    events = json.loads(path.read_text())["traceEvents"]
    return {event["args"]["name"] for event in events if event["name"] == "thread_name"}


def test_simulated_ranks_are_modelled(tmp_path) -> None:
    with mesh_of(2, 2, names=("dp", "tp")) as mesh, trace(tmp_path / "step.json") as e:
        step(mesh)
    events = spans(tmp_path / "step.json")
    assert {event["pid"] for event in events} == {0, 1, 2, 3}
    assert tracks(tmp_path / "step.json") == {"compute", "over tp", "over dp"}
    sent = [event for event in events if event["cat"] == "communication"]
    assert len(sent) == 4 * len(e.communications)
    first = next(event for event in sent if event["pid"] == 0)
    assert first["args"]["reason"].startswith("relu needs the sum")
    assert "test_trace.py" in first["args"]["line"]
    assert first["dur"] == pytest.approx(e.communications[0].seconds * 1e6)
    assert any(event["name"] == "aten::mm" and event["args"]["part of"] == "aten.mm" for event in events)


def test_ranks_wait_for_each_other_and_for_what_they_need(tmp_path) -> None:
    """A rank with a larger shard computes longer; all begin their collective when it has come."""
    costs = CostModel(latency=1.0, peer_latency=0.0)
    with mesh_of(2, names=("tp",)) as mesh, using_cost_model(costs), explain() as e:
        x = distribute_tensor(torch.randn(3, 64), mesh, [Shard(0)], src_data_rank=None)
        x.exp().redistribute(placements=[Replicate()]).cos()
    e.trace(tmp_path / "uneven.json", bytes_per_second=64 * 4)
    events = spans(tmp_path / "uneven.json")
    before, gather, after = (by_name(events, name) for name in ("aten::exp", "all-gather", "aten::cos"))
    assert before[0]["dur"] == pytest.approx(2 * before[1]["dur"])
    assert gather[0]["ts"] == gather[1]["ts"] >= before[0]["ts"] + before[0]["dur"]
    assert all(event["ts"] >= gather[0]["ts"] + gather[0]["dur"] for event in after)


def test_a_collective_runs_beside_ops_until_it_is_waited_for(tmp_path) -> None:
    with mesh_of(2, names=("tp",)) as mesh, explain() as e:
        x = distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)], src_data_rank=None)
        moved = x.redistribute(placements=[Replicate()], async_op=True)
        x.exp()
        moved.cos()
    events = [event for event in spans(e.trace(tmp_path / "beside.json")) if event["pid"] == 0]
    gather, beside, after = (
        next(e for e in events if e["name"] == n) for n in ("all-gather", "aten::exp", "aten::cos")
    )
    assert gather["ts"] <= beside["ts"] < gather["ts"] + gather["dur"]
    assert after["ts"] >= gather["ts"] + gather["dur"]


def test_a_step_without_communication(tmp_path) -> None:
    with mesh_of(2, names=("tp",)) as mesh, explain() as e:
        distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)], src_data_rank=None).exp()
    assert {event["pid"] for event in spans(e.trace(tmp_path / "quiet.json"))} == {0, 1}


@on_processes
def test_processes_are_measured(tmp_path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with explain() as e:
        step(mesh)
    path = e.trace(tmp_path / "step.json")
    assert path.name == f"step.rank{dist.get_rank()}.json"
    events = spans(path)
    assert {event["pid"] for event in events} == {dist.get_rank()}
    assert tracks(path) == {"compute", "over tp", "over dp"}
    assert all(event["dur"] > 0 for event in events)
    dist.barrier()
    if dist.get_rank() == 0:
        merged = merge_traces(sorted(tmp_path.glob("step.rank*.json")), tmp_path / "all.json")
        assert {event["pid"] for event in spans(merged)} == {0, 1, 2, 3}
    dist.barrier()
