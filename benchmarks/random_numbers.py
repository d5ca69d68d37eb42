"""Random numbers on one shard of a distributed tensor, compared with PyTorch's on a plain tensor of that size.

    python benchmarks/random_numbers.py [--print] [--device cuda] [--numbers 100000000]

The process is rank 0 of 4 on the fake process group: what is timed is what one rank does. On a GPU the shard has as
many numbers as asked for, and calls are queued. The CPU takes fewer numbers, with one thread, whose own time counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from report import Report
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise
from shardwise import Shard, init_device_mesh

RANKS = 4
FILLS: dict[str, Callable[[Any], Any]] = {
    "randn_like": torch.randn_like,
    "rand_like": torch.rand_like,
    "normal_": lambda t: t.normal_(),
    "uniform_": lambda t: t.uniform_(),
    "bernoulli_(0.1)": lambda t: t.bernoulli_(0.1),
    "exponential_": lambda t: t.exponential_(),
    "dropout": lambda t: F.dropout(t, 0.1),
}


def best(call: Callable[[], Any], device: str, repeats: int) -> float:
    """Milliseconds of a call, the best of several runs; of a GPU's a run is a queue of calls, as in a program."""
    queued, clock = (20, time.perf_counter) if device == "cuda" else (1, time.thread_time)
    times = []
    for _ in range(repeats):
        if device == "cuda":
            torch.cuda.synchronize()
        start = clock()
        for _ in range(queued):
            call()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append((clock() - start) / queued)
    return min(times) * 1e3


def shapes(numbers: int) -> dict[str, tuple[tuple[int, int], int]]:
    """Return global shapes whose shards hold about so many numbers, and the dim that is sharded."""
    rows = numbers // 1000
    return {
        "rows sharded": ((rows * RANKS, 1000), 0),
        "columns sharded": ((rows, 1000 * RANKS), 1),
        "odd columns": ((numbers // 999, 999 * RANKS), 1),
    }


def compare(report: Report, title: str, device: str, numbers: int, repeats: int) -> None:
    mesh = init_device_mesh(device, (RANKS,))
    rows = []
    for sharding, (shape, dim) in shapes(numbers).items():
        for name, fill in FILLS.items():
            shard = shardwise.zeros(*shape, device_mesh=mesh, placements=[Shard(dim)])
            plain = torch.zeros(shard.to_local().shape, device=device)
            fill(shard)  # compiles, plans
            with torch.no_grad():
                ours = best(lambda: fill(shard), device, repeats)  # noqa: B023
                theirs = best(lambda: fill(plain), device, repeats)  # noqa: B023
            rows.append([f"{name}, {sharding}", f"{ours:.3f}", f"{theirs:.3f}", f"{ours / theirs:.2f}"])
    report.table(title, ["", "shardwise ms", "PyTorch ms", "ratio"], rows)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--numbers", type=int, default=0)
    parser.add_argument("--print", action="store_true")
    given = parser.parse_args()
    numbers = given.numbers or (10**8 if given.device == "cuda" else 4 * 10**6)
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    shardwise.random.set_generator_check(False)  # there are no peers in a fake world
    report = Report("random" if given.device == "cpu" else f"random {given.device}")
    if given.device == "cuda":
        report.add(f"{torch.cuda.get_device_name()}, torch {torch.__version__}.")
        compare(report, f"{numbers:.0e} numbers on a GPU", "cuda", numbers, 20)
    else:
        torch.set_num_threads(1)
        compare(report, f"{numbers:.0e} numbers on a CPU", "cpu", numbers, 5)
    report.save()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
