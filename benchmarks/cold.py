"""The first call of an op with new specs, and with a new batch size, on meshes of 1 to 4 axes of 4 ranks each.

    python benchmarks/cold.py [--print]

Both libraries run on the fake process group, as rank 0 of 4^n. "new specs" is the first call with these placements
ever; "new size" is the same placements with another batch size. Tensors are small, so that what is timed is the
library, not the op.
"""

from __future__ import annotations

import importlib
import random
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from report import Report
from torch.testing._internal.distributed.fake_pg import FakeStore

OPS: dict[str, tuple[Callable[..., Any], Callable[[int], list[tuple[int, ...]]]]] = {
    "add": (torch.add, lambda b: [(b, 64), (b, 64)]),
    "mm": (torch.mm, lambda b: [(b, 64), (64, 64)]),
    "bmm": (torch.bmm, lambda b: [(16, b, 16), (16, 16, 16)]),
    "layer_norm": (lambda x, w, c: F.layer_norm(x, (16,), w, c), lambda b: [(b, 16, 16), (16,), (16,)]),
}
SAMPLES = {"shardwise": 15, "torch.distributed.tensor": 3}  # PyTorch takes up to a second a call


def timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def like_a_program(lib: Any, name: str, axes: int, sample: int) -> list[list[Any]]:
    """Placements as programs have them: the batch over some axes, weights over the others, now this way, now that."""
    R, S = lib.Replicate(), lib.Shard
    batch = [S(0) if axis % 2 == sample % 2 else R for axis in range(axes)]
    batch_dim, weight_dim = {"bmm": (1, 2), "layer_norm": (0, 0)}.get(name, (0, 1))
    batch = [S(batch_dim) if placement is not R else R for placement in batch]
    other = [S(weight_dim) if placement is R else R for placement in batch]
    return {"add": [batch, batch], "layer_norm": [batch, [R] * axes, [R] * axes]}.get(name, [batch, other])


def at_random(lib: Any, name: str, axes: int, sample: int) -> list[list[Any]]:
    """Placements drawn blindly, so that nearly every call has to redistribute."""
    chooser = random.Random(f"{name} {axes} {sample}")
    drawn = []
    for shape in OPS[name][1](64):
        options = [lib.Replicate(), *(lib.Shard(dim) for dim in range(len(shape)))]
        drawn.append([chooser.choice(options) for _ in range(axes)])
    if name == "layer_norm":  # weights are replicated, as they are in programs
        drawn[1:] = [[lib.Replicate()] * axes] * 2
    return drawn


def first_calls(lib: Any, name: str, mesh: Any, samples: int, place: Callable[..., Any]) -> tuple[float, float]:
    """Median milliseconds of first calls, and of calls with a new batch size."""
    op, shapes = OPS[name]
    new_specs: list[float] = []
    new_sizes: list[float] = []
    for sample in range(samples):
        placements = place(lib, name, mesh.ndim, sample)
        for batch, times in ((256 + 8 * (2 * sample), new_specs), (256 + 8 * (2 * sample + 1), new_sizes)):
            pairs = zip(shapes(batch), placements, strict=False)
            tensors = [lib.zeros(*shape, device_mesh=mesh, placements=p) for shape, p in pairs]
            times.append(timed(lambda: op(*tensors)))  # noqa: B023
    return statistics.median(new_specs), statistics.median(new_sizes)


def report_first_calls(report: Report, title: str, place: Callable[..., Any]) -> None:
    rows = []
    for axes in (1, 2, 3, 4):
        dist.init_process_group("fake", rank=0, world_size=4**axes, store=FakeStore())
        found = {}
        for library, samples in SAMPLES.items():
            lib = importlib.import_module(library)
            mesh = dist.init_device_mesh("cpu", (4,) * axes)
            for name in OPS:
                first_calls(lib, name, mesh, 1, lambda lib, name, axes, _: [[lib.Replicate()] * axes] * 3)  # imports
                found[library, name] = first_calls(lib, name, mesh, samples, place)
        dist.destroy_process_group()
        for name in OPS:
            ours, theirs = found["shardwise", name], found["torch.distributed.tensor", name]
            rows.append([f"{name}, {axes}-D", *(f"{value:.2f}" for value in (*ours, *theirs))])
    header = ["", "shardwise, new specs", "new size", "PyTorch, new specs", "new size"]
    report.table(title, header, rows)


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    report = Report("cold")
    report_first_calls(report, "First calls with placements as programs have them, median ms", like_a_program)
    report_first_calls(report, "First calls with placements at random, median ms", at_random)
    report.save()


if __name__ == "__main__":
    main()
