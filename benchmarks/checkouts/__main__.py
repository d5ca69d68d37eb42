"""The figures of two checkouts of this repository side by side: what a change costs.

    python benchmarks/checkouts OLD NEW [--part ops] [--part first] [--only split step] [--rounds 3] [--core 1]

`ops` are the rows of `eager.py`, and the repeated calls of `redistribute.py`; `first` are those of `cold.py`. Each
checkout runs in processes of its own, pinned to one core. They take turns, row by row, so that they meet the same
disturbances. A row has the best and the lower quartile of both checkouts, in microseconds, and the ratio of each; where
both ratios are above 1.03, it is marked.

First calls happen once in a process, so there is a process for each round. Each sample of a row is a call of its own,
and the checkouts are compared sample by sample: a row has the medians, over samples, of the best and of the median over
rounds, and of their ratios. Where samples come in two kinds, as placements alternate, the medians of two checkouts may
be of different kinds; those of ratios are not. In each round the garbage collector interrupts other samples.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORKER = Path(__file__).parent / "worker.py"
Times = dict[str, list[list[float]]]
"""For each row, the times of the first checkout and of the second."""
Statistic = Callable[[list[float]], float]


class Pair:
    """The times of both checkouts, and their ratio, which is that of the times unless it is given."""

    def __init__(self, old: float, new: float, ratio: float | None = None) -> None:
        self.old, self.new = old, new
        self.ratio = new / old if ratio is None else ratio


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
    show({name: [Pair(*map(min, both)), Pair(*map(lower_quartile, both))] for name, both in times.items()})


def first_calls(checkouts: list[Path], given: argparse.Namespace) -> None:
    times: dict[str, list[dict[int, list[float]]]] = defaultdict(lambda: [defaultdict(list), defaultdict(list)])
    for turn in range(given.rounds):
        for which in order(turn):
            worker = start(checkouts[which], "first", given.core, str(turn))
            for name, samples in read(worker).items():
                for sample, time in enumerate(samples):
                    times[name][which][sample].append(time)
            worker.communicate()

    def column(old: dict[int, list[float]], new: dict[int, list[float]], over_rounds: Statistic) -> Pair:
        pairs = [Pair(over_rounds(old[sample]), over_rounds(new[sample])) for sample in old]
        median = statistics.median
        return Pair(median(p.old for p in pairs), median(p.new for p in pairs), median(p.ratio for p in pairs))

    wanted = {name: both for name, both in times.items() if is_wanted(name, given.only)}
    show({name: [column(*both, min), column(*both, statistics.median)] for name, both in wanted.items()})


def is_wanted(name: str, only: list[str]) -> bool:
    return not only or any(text in name for text in only)


def lower_quartile(times: list[float]) -> float:
    return statistics.quantiles(times)[0]


def show(rows: dict[str, list[Pair]]) -> None:
    """Print the rows, in microseconds, and the geometric means of their ratios."""
    width = max(map(len, rows), default=0)
    for name, columns in rows.items():
        text = "   ".join(f"{pair.old:9.2f} {pair.new:9.2f} {pair.ratio:6.3f}" for pair in columns)
        print(f"{name:{width}}   {text}{'  <<<' if min(pair.ratio for pair in columns) > 1.03 else ''}", flush=True)
    means = [math.exp(statistics.mean(math.log(row[i].ratio) for row in rows.values())) for i in (0, 1)]
    print(f"geometric means of {len(rows)} rows: {means[0]:.3f}, {means[1]:.3f}\n", flush=True)


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
