"""A vocabulary of 50,257 words: gathering and reducing shards of different sizes, next to PyTorch.

    python benchmarks/uneven.py [--print] [--device cuda]

    fake      8 ranks on PyTorch's fake process group: what is sent, and the time of the local copies around it
    gloo      4 gloo processes: the time of the calls (CPU only)

`exchange` is shardwise with a cost model in which point-to-point traffic is cheap: one all-to-all of exact pieces in
the place of the native collective.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.tensor as stock
from launch import on_processes
from redistribute import Recorder, fake_world
from report import Report, microseconds
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwise

VOCABULARY, FEATURES = 50_257, 64
EXCHANGE = shardwise.CostModel(latency=1.0, p2p_latency=0.0)
GLOO_RANKS = 4


class Way(NamedTuple):
    library: Any
    model: Callable[[], AbstractContextManager[None]] = nullcontext


WAYS = {
    "shardwise": Way(shardwise),
    "exchange": Way(shardwise, lambda: shardwise.using_cost_model(EXCHANGE)),
    "PyTorch": Way(stock),
}


def cases(library: Any, mesh: DeviceMesh) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The calls, with the names of one library: a gather and a reduce-scatter of each dim."""
    replicate, ranks = [library.Replicate()], mesh.size()
    for dim, shape in enumerate([(VOCABULARY, FEATURES), (FEATURES, VOCABULARY)]):
        full = torch.ones(shape, device=mesh.device_type)
        shard = [library.Shard(dim)]
        local = full.chunk(ranks, dim)[mesh.get_local_rank()].contiguous()
        sharded = library.DTensor.from_local(
            local, mesh, shard, run_check=False, shape=full.shape, stride=full.stride()
        )
        summed = library.DTensor.from_local(full, mesh, [library.Partial()], run_check=False)
        yield f"gather dim {dim}", lambda sharded=sharded: sharded.redistribute(mesh, replicate).to_local() + 0
        yield f"reduce-scatter dim {dim}", lambda summed=summed, to=shard: summed.redistribute(mesh, to).to_local() + 0


def sent(call: Callable[[], Any]) -> tuple[str, float]:
    """The collective of a call, and its bytes over those of an even share."""
    with Recorder(0) as recorder:
        call()
    bound = VOCABULARY * FEATURES * 4 * 7 / 8
    return str(len(recorder.collectives)), sum(c.received for c in recorder.collectives) / bound


def report_fake(report: Report, device: str) -> None:
    rows = []
    with fake_world(8):
        mesh = init_device_mesh(device, (8,), mesh_dim_names=("tp",))
        for name, way in WAYS.items():
            for case, call in cases(way.library, mesh):
                with way.model():
                    count, bytes_received = sent(call)
                    (time,) = microseconds(lambda call=call: (call(), _synchronize(device)), number=2, repeats=10)
                rows.append([f"{case}, {name}", count, f"{bytes_received:.4f}", f"{time / 1e3:.2f}"])
    rows.sort(key=lambda row: row[0].partition(",")[0])
    title = f"{VOCABULARY} x {FEATURES} float32 over 8 ranks, fake group, {device}"
    report.table(title, ["", "collectives", "bytes / even share", "local work ms"], rows)


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def run_gloo() -> list[list[str]]:
    mesh = init_device_mesh("cpu", (GLOO_RANKS,), mesh_dim_names=("tp",))
    times: dict[str, list[float]] = {}
    for _ in range(3):  # the ways take turns, so that they meet the same disturbances
        for way in WAYS.values():
            for case, call in cases(way.library, mesh):
                with way.model():
                    call()
                    dist.barrier()
                    (time,) = microseconds(call, number=2, repeats=4)
                times.setdefault(case + str(list(WAYS.values()).index(way)), []).append(time / 1e3)
    rows = []
    for case, _ in cases(shardwise, mesh):
        ours, exchange, theirs = (min(times[case + str(index)]) for index in range(3))
        ratios = (f"{ours / exchange:.2f}", f"{ours / theirs:.2f}")
        rows.append([case, f"{ours:.1f}", f"{exchange:.1f}", f"{theirs:.1f}", *ratios])
    return rows


def report_gloo(report: Report) -> None:
    rows = on_processes(run_gloo, GLOO_RANKS)
    header = ["", "shardwise ms", "exchange ms", "PyTorch ms", "ratio to exchange", "ratio to PyTorch"]
    report.table(f"{VOCABULARY} x {FEATURES} float32 on {GLOO_RANKS} gloo processes", header, rows)


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    device = "cuda" if "cuda" in sys.argv else "cpu"
    report = Report("uneven" if device == "cpu" else "uneven-cuda")
    report_fake(report, device)
    if device == "cpu":
        report_gloo(report)
        report.save()


if __name__ == "__main__":
    main()
