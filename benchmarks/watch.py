"""What `shardwise.debug.watch` costs a training step, on real processes.

    python benchmarks/watch.py [--print]

Two gloo processes, one thread each. Steps with and without the watch take turns, in blocks.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from report import Report
from torch import nn
from training import Step, all_distributed, local_outputs

import shardwise
from shardwise.debug import watch
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

RANKS = 2
BLOCKS = int(os.environ.get("BLOCKS", "24"))
STEPS = 5


def wide(mesh: Any) -> Step:
    """A step whose products take most of its time, as in training they do."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)) for _ in range(4)))
    plan = {"*.0": ColwiseParallel(use_local_output=False), "*.2": RowwiseParallel(use_local_output=False)}
    model = parallelize_module(layers, mesh, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    x = shardwise.distribute_tensor(torch.randn(256, 512), mesh, [shardwise.Replicate()])

    def run() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return run


def compare(step: Step) -> tuple[float, ...]:
    """Milliseconds of a step without and with the watch, by the clock and of CPU time, and how much more that is."""
    clock: dict[bool, list[float]] = {False: [], True: []}
    cpu: dict[bool, list[float]] = {False: [], True: []}
    for block in range(-1, BLOCKS):
        for watched in (False, True) if block % 2 else (True, False):
            with watch() if watched else contextlib.nullcontext():
                step()
                dist.barrier()
                start, start_cpu = time.perf_counter(), time.process_time()
                for _ in range(STEPS):
                    step()
                took = time.perf_counter() - start, time.process_time() - start_cpu
            if block >= 0:
                for times, seconds in zip((clock, cpu), took, strict=True):
                    times[watched].append(1e3 * seconds / STEPS)
    return tuple(number for times in (clock, cpu) for number in _summary(times[False], times[True]))


def _summary(off: list[float], on: list[float]) -> tuple[float, float, float]:
    """The medians, and the median of how many percent more each block with the watch took than its neighbour."""
    more = [100 * (b / a - 1) for a, b in zip(off, on, strict=True)]
    return statistics.median(off), statistics.median(on), statistics.median(more)


def run(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    port = Path(folder, "port")
    if store is not None:
        port.with_suffix(".new").write_text(str(store.port))
        port.with_suffix(".new").rename(port)
    while not port.exists():
        time.sleep(0.01)
    store = store or dist.TCPStore("127.0.0.1", int(port.read_text()), is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    mesh = dist.init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    steps = {
        "4 small blocks, all tensors distributed": all_distributed("shardwise", mesh, "cpu"),
        "4 small blocks, local activations": local_outputs("shardwise", mesh, "cpu"),
        "4 feed-forward blocks of 512 features": wide(mesh),
    }
    rows = []
    for name, step in steps.items():
        off, on, more, cpu_off, cpu_on, cpu_more = compare(step)
        numbers = f"{off:.1f}", f"{on:.1f}", f"{more:+.1f} %", f"{cpu_off:.2f}", f"{cpu_on:.2f}", f"{cpu_more:+.2f} %"
        rows.append([name, *numbers])
    if rank == 0:
        report = Report("watch")
        report.table(
            f"A training step with and without the watch, {RANKS} gloo processes, milliseconds",
            ["", "without", "with", "more", "CPU without", "CPU with", "more"],
            rows,
        )
        report.save()
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    # The processes import this file and its neighbours.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, (folder,), nprocs=RANKS, start_method="spawn")


if __name__ == "__main__":
    sys.exit(main())
