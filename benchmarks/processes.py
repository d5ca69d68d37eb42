"""What local tensors and styles cost on real processes, and how often they communicate, next to PyTorch.

    python benchmarks/processes.py [--print]

Two gloo processes, one thread each. On the fake process group of the other benchmarks a collective returns at once, and
one that was not asked for would not be seen.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from launch import on_processes
from report import Report, microseconds
from torch import nn
from training import local_outputs, milliseconds

LIBRARIES = ("shardwise", "torch.distributed.tensor")
RANKS = 2

Calls = dict[str, Callable[[], object]]


def calls(library: str, mesh: Any) -> Calls:
    """The calls that are timed, with the names of one library."""
    lib, styles = importlib.import_module(library), importlib.import_module(f"{library}.parallel")
    local_map = importlib.import_module(f"{library}.experimental").local_map
    local = torch.randn(4, 16, 64)
    shard = [lib.Shard(1)]
    sharded = lib.DTensor.from_local(local, mesh, shard)
    double = local_map(lambda x: x * 2, out_placements=shard)
    norm = styles.parallelize_module(nn.LayerNorm(64), mesh, styles.SequenceParallel(use_local_output=True))
    mlp = styles.parallelize_module(
        nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)),
        mesh,
        {
            "0": styles.ColwiseParallel(input_layouts=lib.Shard(1)),
            "1": styles.RowwiseParallel(output_layouts=lib.Shard(1)),
        },
    )
    return {
        "from_local": lambda: lib.DTensor.from_local(local, mesh, shard),
        "local_map": lambda: double(sharded),
        "norm, SequenceParallel, plain input": lambda: norm(local),
        "two linears, plain input": lambda: mlp(local) + 0,  # PyTorch waits for the result when it is used
        "full_tensor": lambda: sharded.full_tensor(),
    }


def collectives(library: str, call: Callable[[], object]) -> int:
    """How many collectives a call takes."""
    with importlib.import_module(f"{library}.debug").CommDebugMode() as comm:
        call()
    return comm.get_total_counts()


def run() -> None:
    torch.manual_seed(0)
    mesh = dist.init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    both = [calls(library, mesh) for library in LIBRARIES]
    rows = []
    with torch.no_grad():
        for name in both[0]:
            counts = [collectives(library, of[name]) for library, of in zip(LIBRARIES, both, strict=True)]
            ours, theirs = microseconds(*(of[name] for of in both), number=20, repeats=20)
            rows.append([name, f"{ours:.0f}", f"{theirs:.0f}", f"{ours / theirs:.2f}", *map(str, counts)])
    steps = {library: local_outputs(library, mesh, "cpu") for library in LIBRARIES}
    counts = [collectives(library, step) for library, step in steps.items()]
    ours, theirs = milliseconds(steps, "cpu", number=3, repeats=6).values()
    rows.append(["training step, local outputs", f"{ours * 1e3:.0f}", f"{theirs * 1e3:.0f}", f"{ours / theirs:.2f}"])
    rows[-1] += map(str, counts)
    if dist.get_rank() == 0:
        report = Report("processes")
        header = ["", "shardwise us", "PyTorch us", "ratio", "collectives", "PyTorch's"]
        report.table("Calls on 2 gloo processes", header, rows)
        report.save()


def main() -> None:
    on_processes(run, RANKS)


if __name__ == "__main__":
    sys.exit(main())
