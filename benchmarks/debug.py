"""What the tools of shardwise.debug cost: a training step without them, and under each of them.

The step is forward, backward and AdamW of 4 transformer blocks with tensor and sequence parallel styles, every tensor
distributed. It runs on rank 0 of 4 of PyTorch's fake process group, where collectives return at once, so that all of
the difference is the tool's; and on 4 simulated ranks. Plans are warm.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from report import Report
from torch.testing._internal.distributed.fake_pg import FakeStore
from training import Step, all_distributed, milliseconds

from shardwise import init_device_mesh, simulate
from shardwise.debug import CommDebugMode, budget, explain

RANKS = 4

TOOLS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": nullcontext,
    "CommDebugMode": CommDebugMode,
    "explain": explain,
    "budget": lambda: budget(total=1000),
}
"""Contexts in which the step runs."""


def under(tool: Callable[[], AbstractContextManager[Any]], step: Step) -> Step:
    """The step, each time inside the tool."""

    def run() -> None:
        with tool():
            step()

    return run


@contextmanager
def fake_group():
    """Rank 0 of a process group that moves nothing."""
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def measure(report: Report, title: str, world: AbstractContextManager[Any], number: int) -> None:
    with world:
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
        step = all_distributed("shardwise", mesh, "cpu")
        times = milliseconds({name: under(tool, step) for name, tool in TOOLS.items()}, "cpu", number, repeats=8)
        with explain() as explained:
            step()
    rows = [[name, f"{time:.1f}", f"{time / times['none']:.2f}"] for name, time in times.items()]
    report.table(f"{title}, {len(explained.communications)} collectives", ["tool", "ms a step", "of none"], rows)


def main() -> None:
    torch.set_num_threads(1)
    report = Report("debug")
    measure(report, "Rank 0 of 4 of a fake group", fake_group(), number=3)
    measure(report, "4 simulated ranks", simulate(RANKS), number=2)
    report.save()


if __name__ == "__main__":
    main()
