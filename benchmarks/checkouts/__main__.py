"""The figures of two checkouts of this repository side by side: what a change costs.

    python benchmarks/checkouts OLD NEW [--part ops] [--part first] [--only split step] [--rounds 3] [--core 1]

`ops` are the rows of `eager.py`, and the repeated calls of `redistribute.py`; `first` are those of `cold.py`. Each
checkout runs in processes of its own, pinned to one core. They take turns, row by row, so that they meet the same
disturbances. A row has the best and the lower quartile of both checkouts, in microseconds, and the ratio of each; where
both ratios are above 1.03, it is marked. First calls happen once in a process, so there is a process for each round: a
row is the median over samples of the best, and of the median, over rounds. In each round the garbage collector
interrupts other samples, so that a row is not slower because its samples happen to be those.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

WORKER = Path(__file__).parent / "worker.py"
Times = dict[str, list[list[float]]]
"""For each row, the times of the first checkout and of the second."""


def start(checkout: Path, part: str, core: str, *options: str) -> subprocess.Popen[str]:
    paths = [str(checkout / "src"), str(checkout / "benchmarks")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    command = ["taskset", "-c", core, sys.executable, str(WORKER), part, *options]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment, cwd=checkout)


def read(worker: subprocess.Popen[str]) -> Any:
    assert worker.stdout is not None
    line = worker.stdout.readline()
    if not line:
        raise SystemExit(f"{worker.args} ended with {worker.wait()}")
    return json.loads(line)


def order(turn: int) -> tuple[int, int]:
    return (0, 1) if turn % 2 else (1, 0)


def ops(checkouts: list[Path], given: argparse.Namespace) -> None:
    times: Times = defaultdict(lambda: [[], []])
    for _ in range(given.rounds):
        workers = [start(checkout, "ops", given.core) for checkout in checkouts]
        names, _ = (read(worker) for worker in workers)
        names = [name for name in names if is_wanted(name, given.only)]
        for turn in range(given.repeats):
            for name in names:
                for which in order(turn):
                    print(json.dumps(name), file=workers[which].stdin, flush=True)
                    times[name][which].append(read(workers[which]))
        for worker in workers:
            worker.communicate()
    show({name: [(min(both[i]), statistics.quantiles(both[i])[0]) for i in (0, 1)] for name, both in times.items()})


def first_calls(checkouts: list[Path], given: argparse.Namespace) -> None:
    times: dict[str, list[dict[int, list[float]]]] = defaultdict(lambda: [defaultdict(list), defaultdict(list)])
    for turn in range(given.rounds):
        for which in order(turn):
            worker = start(checkouts[which], "first", given.core, str(turn))
            for name, samples in read(worker).items():
                for sample, time in enumerate(samples):
                    times[name][which][sample].append(time)
            worker.communicate()

    def row(samples: dict[int, list[float]]) -> tuple[float, float]:
        rounds = samples.values()
        return statistics.median(map(min, rounds)), statistics.median(map(statistics.median, rounds))

    show({name: [row(both[i]) for i in (0, 1)] for name, both in times.items() if is_wanted(name, given.only)})


def is_wanted(name: str, only: list[str]) -> bool:
    return not only or any(text in name for text in only)


def show(rows: dict[str, list[tuple[float, float]]]) -> None:
    """Print the rows, in microseconds, and the geometric means of their ratios."""
    ratios: list[tuple[float, float]] = []
    width = max(map(len, rows), default=0)
    for name, (old, new) in rows.items():
        ratios.append((new[0] / old[0], new[1] / old[1]))
        both = "   ".join(f"{old[i]:9.2f} {new[i]:9.2f} {ratios[-1][i]:6.3f}" for i in (0, 1))
        print(f"{name:{width}}   {both}{'  <<<' if min(ratios[-1]) > 1.03 else ''}", flush=True)
    means = [math.exp(statistics.mean(math.log(pair[i]) for pair in ratios)) for i in (0, 1)]
    print(f"geometric means of {len(ratios)} rows: {means[0]:.3f}, {means[1]:.3f}\n", flush=True)


PARTS = {"ops": ops, "first": first_calls}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkouts", nargs=2, type=Path, metavar="CHECKOUT")
    parser.add_argument("--part", action="append", choices=PARTS, help="all by default")
    parser.add_argument("--only", nargs="*", default=[], help="rows whose names contain one of these")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=30, help="turns in a round")
    parser.add_argument("--core", default="0")
    given = parser.parse_args()
    for part in given.part or PARTS:
        PARTS[part]([checkout.resolve() for checkout in given.checkouts], given)


if __name__ == "__main__":
    main()
