"""What `shardwise.debug.watch` costs a training step, on real processes.

    python benchmarks/watch.py [--print]

Two gloo processes, one thread each. Steps with and without the watch take turns, in blocks.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import threading
import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from in_place import timing_hooks
from launch import on_processes
from report import Report
from torch import nn
from training import Step, all_distributed, local_outputs

import shardwise
from shardwise.debug import watch
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

RANKS = 2
BLOCKS = int(os.environ.get("BLOCKS", "12"))
STEPS = 20


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


class Cost(NamedTuple):
    """What a step costs, in milliseconds, and what the watch adds to it."""

    step: float
    """By the clock, without the watch."""
    watched: float
    """By the clock, with the watch."""
    hooks: float
    """What the watch does in the thread of the program, timed in place."""
    thread: float
    """The CPU time of the thread of the watch while a step runs."""

    @property
    def percent(self) -> float:
        """Both as a share of a step."""
        return 100 * (self.hooks + self.thread) / self.step


def compare(step: Step) -> Cost:
    """Steps with and without the watch, in blocks that take turns.

    By the clock, steps on processes vary by far more than the watch costs: what counts are the hooks timed in place.
    """
    clock: dict[bool, list[float]] = {False: [], True: []}
    hooks: dict[bool, list[float]] = {False: [], True: []}
    with_detour: list[float] = []
    of_watch: list[float] = []
    for block in range(-1, BLOCKS):
        for watched in (False, True) if block % 2 else (True, False):
            with watch() if watched else contextlib.nullcontext():
                step()
                dist.barrier()
                start, start_watch = time.perf_counter(), watch_time()
                for _ in range(STEPS):
                    step()
                took = time.perf_counter() - start, watch_time() - start_watch
                in_place = timed_in_place(step)
                detour = timed_in_place(step, detour=True) if watched else []
            if block >= 0:
                clock[watched].append(1e3 * took[0] / STEPS)
                hooks[watched] += in_place
                with_detour += detour
                if watched:
                    of_watch.append(1e3 * took[1] / STEPS)
    timed, look_ups = statistics.median(hooks[True]), statistics.median(hooks[False])
    timer = statistics.median(with_detour) - timed
    medians = statistics.median(clock[False]), statistics.median(clock[True])
    return Cost(*medians, timed - timer - look_ups, statistics.mean(of_watch))


def timed_in_place(step: Step, detour: bool = False) -> list[float]:
    """The milliseconds in hooks and look-ups of ops, for each of a few steps."""
    found = []
    with timing_hooks(detour) as timer:
        for _ in range(STEPS // 2):
            before = timer.spent
            step()
            found.append(1e-6 * (timer.spent - before))
    return found[1:]


def watch_time() -> float:
    """The CPU seconds of the thread of the watch; 0 if there is none."""
    found = [thread for thread in threading.enumerate() if "watch" in thread.name]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(thread.ident)) for thread in found if thread.ident)


def run() -> None:
    mesh = dist.init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    steps = {
        "4 small blocks, all tensors distributed": all_distributed("shardwise", mesh, "cpu"),
        "4 small blocks, local activations": local_outputs("shardwise", mesh, "cpu"),
        "4 feed-forward blocks of 512 features": wide(mesh),
    }
    rows = []
    for name, step in steps.items():
        cost = compare(step)
        numbers = f"{cost.step:.1f}", f"{cost.watched:.1f}", f"{cost.hooks:.3f}", f"{cost.thread:.3f}"
        rows.append([name, *numbers, f"{cost.percent:.2f} %"])
    if dist.get_rank() == 0:
        report = Report("watch")
        report.table(
            f"A training step with and without the watch, {RANKS} gloo processes, milliseconds",
            ["", "without", "with", "in hooks", "in the watch's thread", "together, of a step"],
            rows,
        )
        report.save()


def main() -> None:
    on_processes(run, RANKS)


if __name__ == "__main__":
    sys.exit(main())
