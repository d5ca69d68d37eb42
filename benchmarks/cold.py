"""The first call of an op with new specs, and with a new batch size, on meshes of 1 to 4 axes of 4 ranks each.

    python benchmarks/cold.py [--axes 4] [--no-torch]

Both libraries run on the fake process group, as rank 0 of 4^n. "new specs" is the first call with these placements
ever; "new size" is the same placements with another batch size. Tensors are small, so that what is timed is the
library. Medians over several placements, milliseconds.
"""

from __future__ import annotations

import argparse
import importlib
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

OPS: dict[str, tuple[Callable[..., Any], Callable[[int], list[tuple[int, ...]]]]] = {
    "add": (torch.add, lambda b: [(b, 64), (b, 64)]),
    "mm": (torch.mm, lambda b: [(b, 64), (64, 64)]),
    "bmm": (torch.bmm, lambda b: [(16, b, 16), (16, 16, 16)]),
    "layer_norm": (lambda x, w, c: F.layer_norm(x, (16,), w, c), lambda b: [(b, 16, 16), (16,), (16,)]),
}


def timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def placements_for(lib: Any, shape: tuple[int, ...], axes: int, chooser: random.Random) -> list[Any]:
    options = [lib.Replicate(), *(lib.Shard(dim) for dim in range(len(shape)))]
    return [chooser.choice(options) for _ in range(axes)]


def run_op(lib: Any, name: str, mesh: Any, samples: int) -> tuple[list[float], list[float]]:
    """Milliseconds of first calls, and of calls with a new batch size."""
    op, shapes = OPS[name]
    chooser = random.Random(0)
    new_specs, new_sizes = [], []
    for sample in range(samples):
        placements = [placements_for(lib, shape, mesh.ndim, chooser) for shape in shapes(64)]
        if name == "layer_norm":  # weights are replicated, as they are in programs
            placements[1:] = [[lib.Replicate()] * mesh.ndim] * 2
        for batch, times in ((64 + 8 * (2 * sample), new_specs), (64 + 8 * (2 * sample + 1), new_sizes)):
            tensors = [
                lib.zeros(*shape, device_mesh=mesh, placements=p)
                for shape, p in zip(shapes(batch), placements, strict=True)
            ]
            times.append(timed(lambda: op(*tensors)))  # noqa: B023
    return new_specs, new_sizes


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--axes", type=int, default=4)
    parser.add_argument("--samples", type=int, default=9)
    parser.add_argument("--no-torch", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    libraries = ["shardwise"] if options.no_torch else ["shardwise", "torch.distributed.tensor"]
    print(
        f"{'':12} {'axes':>4} {'library':26} {'new specs: median':>18} {'max':>8} {'new size: median':>18} {'max':>8}"
    )
    for axes in range(1, options.axes + 1):
        dist.init_process_group("fake", rank=0, world_size=4**axes, store=FakeStore())
        for library in libraries:
            lib = importlib.import_module(library)
            mesh = dist.init_device_mesh("cpu", (4,) * axes)
            for name in OPS:
                samples = options.samples if library == "shardwise" or axes < 3 else 3
                warm = lib.zeros(4, 4, device_mesh=mesh, placements=[lib.Replicate()] * axes)
                warm + warm
                specs, sizes = run_op(lib, name, mesh, samples)
                print(
                    f"{name:12} {axes:>4} {library:26} {statistics.median(specs):>15.2f} ms {max(specs):>8.2f} "
                    f"{statistics.median(sizes):>15.2f} ms {max(sizes):>8.2f}",
                    flush=True,
                )
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
