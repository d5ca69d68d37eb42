"""Every public name of shardwise.debug works on simulated ranks and on processes, with plain activations of styles."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise.debug
from shardwise import DeviceMesh, DTensor, Shard, distribute_tensor, init_device_mesh
from shardwise.debug import (
    CommDebugMode,
    Drawing,
    Explanation,
    Report,
    budget,
    check_local_tensors,
    draw,
    explain,
    load_ipython_extension,
    merge_traces,
    report,
    show,
    trace,
    visualize_sharding,
)
from shardwise.errors import BudgetError
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from shardwise.world import current_world
from tests.processes.pool import on_processes
from tests.worlds import mesh_of


def step(mesh: DeviceMesh) -> Callable[[], None]:
    """A step of a module whose styles hand out plain local tensors, as they do by default."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = torch.ones(4, 8, requires_grad=True)
    return lambda: model(x).sum().backward()


def counts(mesh: DeviceMesh, folder: Path) -> None:
    run = step(mesh)
    with CommDebugMode() as comm:
        run()
    assert comm.get_comm_counts()[torch.ops.c10d_functional.all_reduce] == 2
    assert "all-reduce over tp" in comm.generate_comm_debug_tracing_table(noise_level=0)


def explains(mesh: DeviceMesh, folder: Path) -> None:
    told = explain(step(mesh))
    assert isinstance(told, Explanation)
    assert [(c.cause, c.module, c.bytes) for c in told.communications] == [
        ("conversion", "Sequential.2", 192),
        ("gradient", "Sequential.0", 192),
    ]
    assert {c.line.text for c in told.communications} == {"return lambda: model(x).sum().backward()"}


def limits(mesh: DeviceMesh, folder: Path) -> None:
    run = step(mesh)
    with budget(all_reduce=2, bytes="1 KiB", over="tp"):
        run()
    with pytest.raises(BudgetError, match="2 all_reduce over tp where 1 is allowed"), budget(all_reduce=1, over="tp"):
        run()


def traces(mesh: DeviceMesh, folder: Path) -> None:
    with trace(folder / "step.json"):
        step(mesh)()
    if current_world() is None:
        dist.barrier()
    merged = merge_traces(sorted(folder.glob("step*.json")), folder / f"all of {dist.get_rank()}")
    assert {event["pid"] for event in json.loads(merged.read_text())["traceEvents"]} == {0, 1, 2, 3}


def draws(mesh: DeviceMesh, folder: Path) -> None:
    x = distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)])
    assert "f32[8@tp, 4] on mesh(tp=4)" in draw(x)
    visualize_sharding(x)


def checks(mesh: DeviceMesh, folder: Path) -> None:
    with check_local_tensors():
        DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)])


def shows(mesh: DeviceMesh, folder: Path) -> None:
    x = distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)])
    drawing = show(x)
    assert isinstance(drawing, Drawing)
    assert repr(drawing) == draw(x)
    types: dict[type, Callable[[object], object]] = {}
    formatter = SimpleNamespace(for_type=types.__setitem__)
    load_ipython_extension(SimpleNamespace(display_formatter=SimpleNamespace(formatters={"text/html": formatter})))
    assert "tp" in types[DeviceMesh](mesh)


def reports(mesh: DeviceMesh, folder: Path) -> None:
    found = report(step(mesh), folder / "report.html")
    assert isinstance(found, Report)
    assert found.total.count == 2
    if current_world() is None:
        dist.barrier()
    assert "Sequential.2" in (folder / "report.html").read_text()


USES = {
    "CommDebugMode": counts,
    "Explanation": explains,
    "explain": explains,
    "budget": limits,
    "trace": traces,
    "merge_traces": traces,
    "draw": draws,
    "visualize_sharding": draws,
    "check_local_tensors": checks,
    "Drawing": shows,
    "show": shows,
    "load_ipython_extension": shows,
    "Report": reports,
    "report": reports,
}


WATCH = {"watch", "unwatched"}
"""Tested on processes, and in simulated worlds, in tests/debug/watching."""


def test_every_public_name_is_here() -> None:
    assert set(USES) | WATCH == set(shardwise.debug.__all__)


@pytest.mark.parametrize("use", dict.fromkeys(USES.values()), ids=lambda use: use.__name__)
def test_on_simulated_ranks(use, tmp_path) -> None:
    with mesh_of(4, names=("tp",)) as mesh:
        use(mesh, tmp_path)


@on_processes
def test_on_processes(tmp_path) -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    for use in dict.fromkeys(USES.values()):
        use(mesh, tmp_path)
