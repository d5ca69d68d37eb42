"""The overhead of an op on a distributed tensor over the op on a plain one, and the time of a training step.

    python benchmarks/eager.py [--print] [--device cuda] [--ops] [--step]

Both libraries run on the fake process group, as rank 0 of 4, with one thread. Tensors are small, so that what is timed
is the library, not the op. "overhead" is the time less that of the plain op on the local shards.
"""

from __future__ import annotations

import argparse
import importlib
import math
import statistics
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from report import Report, microseconds
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from training import all_distributed, local_outputs, milliseconds, plain

LIBRARIES = ("shardwise", "torch.distributed.tensor")
RANKS = 4


class Case(NamedTuple):
    """An op, the global shapes of its tensors, and the dim that each is sharded along, None for replicated."""

    run: Callable[..., Any]
    tensors: list[tuple[tuple[int, ...], int | None]]


ROWS = ((16, 64), 0)
HEADS = ((8, 16, 64), 0)
OPS: dict[str, Case] = {
    "add": Case(torch.add, [ROWS, ROWS]),
    "mul by a scalar": Case(lambda x: x * 0.5, [ROWS]),
    "mm": Case(torch.mm, [ROWS, ((64, 32), None)]),
    "linear, 3-D": Case(F.linear, [((4, 8, 64), None), ((128, 64), 0), ((128,), 0)]),
    "view": Case(lambda x: x.view(-1, 16, 8, 8), [HEADS]),
    "t": Case(torch.t, [ROWS]),
    "transpose": Case(lambda x: x.transpose(1, 2), [HEADS]),
    "sum": Case(lambda x: x.sum(), [((16, 64), None)]),
    "mean(-1)": Case(lambda x: x.mean(-1), [HEADS]),
    "layer_norm": Case(lambda x, w, b: F.layer_norm(x, (64,), w, b), [HEADS, ((64,), None), ((64,), None)]),
    "softmax": Case(lambda x: x.softmax(-1), [HEADS]),
    "gelu": Case(F.gelu, [HEADS]),
    "detach": Case(lambda x: x.detach(), [ROWS]),
    "split": Case(lambda x: x.split(16, 1), [ROWS]),
    "slice": Case(lambda x: x[:, 8:24], [ROWS]),
    "cat": Case(lambda x, y: torch.cat([x, y], 1), [ROWS, ROWS]),
    "cast": Case(lambda x: x.to(torch.bfloat16), [ROWS]),
}


def distributed(lib: Any, mesh: Any, case: Case, device: str, grad: bool) -> list[Tensor]:
    made = []
    for shape, dim in case.tensors:
        placement = lib.Replicate() if dim is None else lib.Shard(dim)
        tensor = lib.distribute_tensor(torch.randn(shape, device=device), mesh, [placement])
        made.append(tensor.requires_grad_(grad))
    return made


def op_times(mesh: Any, case: Case, device: str, grad: bool) -> list[float]:
    """Microseconds of the plain op on local shards, and of both libraries."""
    calls = []
    tensors: list[Any] = []
    for library in LIBRARIES:
        tensors = distributed(importlib.import_module(library), mesh, case, device, grad)
        calls.append(lambda tensors=tensors: case.run(*tensors))
    local = [tensor.detach().to_local().requires_grad_(grad) for tensor in tensors]
    calls.insert(0, lambda: case.run(*local))
    return microseconds(*calls, repeats=60)


def edge_times(mesh: Any, device: str, grad: bool) -> dict[str, list[float]]:
    """Microseconds of redistribute, from_local and to_local in both libraries."""
    found: dict[str, list[Any]] = {"redistribute": [], "from_local": [], "to_local": []}
    for library in LIBRARIES:
        lib = importlib.import_module(library)
        sharded, replicated = [lib.Shard(0)], [lib.Replicate()]
        tensor = lib.distribute_tensor(torch.randn(16, 64, device=device), mesh, sharded).requires_grad_(grad)
        local = torch.randn(4, 64, device=device, requires_grad=grad)
        found["redistribute"].append(lambda t=tensor, p=replicated: t.redistribute(placements=p))
        found["from_local"].append(
            lambda lib=lib, x=local, p=sharded: lib.DTensor.from_local(x, mesh, p, run_check=False)
        )
        found["to_local"].append(lambda t=tensor: t.to_local())
    return {name: microseconds(*calls, repeats=60) for name, calls in found.items()}


def optimizer_times(mesh: Any, device: str) -> list[float]:
    """Microseconds of AdamW, foreach, over 50 parameters: plain local ones, and of both libraries."""
    calls = []
    for library in (None, *LIBRARIES):
        params = []
        for i in range(50):
            data = torch.randn(16, 16, device=device)
            if library is not None:
                lib = importlib.import_module(library)
                data = lib.distribute_tensor(data, mesh, [lib.Shard(0) if i % 2 else lib.Replicate()])
            elif i % 2:
                data = data[:4].clone()
            params.append(torch.nn.Parameter(data))
            params[-1].grad = torch.ones_like(data)
        calls.append(torch.optim.AdamW(params, foreach=True).step)
    for call in calls:
        call()
    return microseconds(*calls, number=5, repeats=30)


def report_ops(report: Report, mesh: Any, device: str) -> None:
    for grad in (False, True):
        rows, ratios, worst = [], [], ("", 0.0)
        for name, case in OPS.items():
            local, ours, theirs = op_times(mesh, case, device, grad)
            ratio = (ours - local) / (theirs - local)
            ratios.append(ratio)
            worst = max(worst, (name, ratio), key=lambda pair: pair[1])
            rows.append([name, f"{local:.1f}", f"{ours:.1f}", f"{theirs:.1f}", f"{ratio:.2f}"])
        for name, (ours, theirs) in edge_times(mesh, device, grad).items():
            rows.append([name, "", f"{ours:.1f}", f"{theirs:.1f}", f"{ours / theirs:.2f}"])
        if not grad:
            local, ours, theirs = optimizer_times(mesh, device)
            ratio = (ours - local) / (theirs - local)
            rows.append(["AdamW, 50 params", f"{local:.0f}", f"{ours:.0f}", f"{theirs:.0f}", f"{ratio:.2f}"])
        header = ["", "plain", "shardwise", "PyTorch", "overhead ratio"]
        report.table(f"{'With' if grad else 'Without'} grad, us", header, rows)
        mean = math.exp(statistics.mean(math.log(max(r, 0.01)) for r in ratios))
        report.add(f"Geometric mean of the {len(ratios)} ops: {mean:.2f}; largest: {worst[0]}, {worst[1]:.2f}.")


def report_step(report: Report, mesh: Any, device: str) -> None:
    steps, refused = {"plain, one device": plain(device)}, []
    for name, build in (("local outputs", local_outputs), ("all distributed", all_distributed)):
        for library in LIBRARIES:
            step = build(library, mesh, device)
            try:
                step()
                steps[f"{library}, {name}"] = step
            except Exception as error:
                refused.append([f"{library}, {name}", type(error).__name__])
    times = milliseconds(steps, device)
    rows = [[name, f"{time:.2f}"] for name, time in times.items()] + refused
    report.table("A training step: forward, backward and foreach AdamW of 4 blocks, ms", ["", "ms"], rows)
    ours, theirs = (times[f"{library}, local outputs"] for library in LIBRARIES)
    ratios = f"{ours / theirs:.2f} of PyTorch's time", f"{times['shardwise, all distributed'] / ours:.2f} of that"
    report.add(f"Local outputs: {ratios[0]}. All distributed: {ratios[1]}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--print", action="store_true", help="leave README.md alone")
    parser.add_argument("--ops", action="store_true", help="only the ops")
    parser.add_argument("--step", action="store_true", help="only the training step")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    mesh = dist.init_device_mesh(given.device, (RANKS,), mesh_dim_names=("tp",))
    report = Report("eager" if given.device == "cpu" else f"eager-{given.device}")
    if given.device == "cuda":
        report.add(f"{torch.cuda.get_device_name()}.")
    if given.ops or not given.step:
        report_ops(report, mesh, given.device)
    if given.step or not given.ops:
        report_step(report, mesh, given.device)
    report.save()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
