"""The command line of the coverage script.

    python -m shardwise.testing.coverage                       all entries; writes docs/coverage.md
    python -m shardwise.testing.coverage --quick               some of them
    python -m shardwise.testing.coverage --only =addmm,fft     entries by name, or by a part of it
    python -m shardwise.testing.coverage --gloo                some of them, on four processes
    python -m shardwise.testing.coverage --dtypes int64,bool --variants function,inplace,out
    python -m shardwise.testing.coverage --variants strided,channels_last,expanded
    python -m shardwise.testing.coverage --sizes               shapes of results at several sizes, in random order

The exit code is 1 if there was a failure.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from ..._torch.testing import operator_database
from ..children import Lost, in_children
from .entry import Effort, Outcome, cover
from .processes import TOGETHER, SideOfRank, cover_on_processes
from .samples import Sweep
from .sides import Processes, Simulated
from .sizes import stale_shapes
from .table import DOCUMENT, document, read_reference, summary, write_reference

FULL = Effort(most=4, local=True)
REFERENCE = Effort(placements=2)  # four processes that plan every call take long
FEWER = Effort(samples=2, placements=2, most=2)
QUICK_ENTRIES = 60
GLOO_ENTRIES = 96
SECONDS = 200.0  # seconds for an entry
CHILDREN = 2
BAD = ("wrong", "error", "crash", "slow")


def covered(
    names: Sequence[str], effort: Effort, seed: int, sweep: Sweep, on_gloo: SideOfRank | None = None
) -> Iterator[Outcome]:
    """Cover entries in child processes, two at a time; yields outcomes as they are ready."""
    jobs: dict[tuple[str, ...], Callable[[], list[Outcome]]] = {}
    size = 1 if on_gloo is None else TOGETHER
    for start in range(0, len(names), size):
        chunk = tuple(names[start : start + size])
        if on_gloo is None:
            jobs[chunk] = partial(_simulated, chunk, effort, seed, sweep)
        else:
            jobs[chunk] = partial(cover_on_processes, chunk, effort, on_gloo, seed, sweep)
    for given, answer in in_children(jobs, CHILDREN, SECONDS * size):
        if isinstance(answer, Lost):
            kind = answer.reason if answer.reason in BAD else "error"
            yield from (Outcome(name, kind, failures=[f"{kind}: {answer.reason}"]) for name in given)
        else:
            yield from answer


def _simulated(names: Sequence[str], effort: Effort, seed: int, sweep: Sweep) -> list[Outcome]:
    return [cover(name, effort, Simulated(), seed, sweep) for name in names]


def chosen(only: str | None, count: int | None, seed: int) -> list[str]:
    """Return entries whose names contain one of these parts (or equal `=NAME`), or a sample of this size."""
    names = list(operator_database())
    if only:
        parts = only.split(",")
        return [name for name in names if any(name == part[1:] if part[0] == "=" else part in name for part in parts)]
    return names if count is None else random.Random(seed).sample(names, count)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m shardwise.testing.coverage")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ENTRIES} entries")
    parser.add_argument("--only", metavar="NAMES", help="entries whose names contain one of these, or =NAME")
    parser.add_argument("--seed", type=int, default=0, help="chooses samples and placements")
    parser.add_argument("--gloo", action="store_true", help=f"{GLOO_ENTRIES} entries on four processes")
    parser.add_argument("--dtypes", default="", help="dtypes of the samples, separated by commas, instead of float32")
    parser.add_argument(
        "--variants", default="function", help="some of function, strided, channels_last, expanded, inplace, out"
    )
    parser.add_argument("--sizes", action="store_true", help="only compare shapes of results at several sizes")
    parser.add_argument("--json", type=Path, help="write the outcomes to this file")
    return parser


def compare_sizes(names: Sequence[str], seed: int) -> int:
    """Compare shapes of results at several sizes; returns the exit code."""
    jobs = {name: partial(stale_shapes, name, seed) for name in names}
    calls = wrong = 0
    for number, (name, answer) in enumerate(in_children(jobs, CHILDREN, SECONDS), 1):
        compared, failures = (0, [f"lost: {answer.reason}"]) if isinstance(answer, Lost) else answer
        calls, wrong = calls + compared, wrong + len(failures)
        print(f"{number}/{len(names)} {name}: {compared} calls", *failures, sep="\n        ", flush=True)
    print(f"{calls} calls of ops compared, {wrong} wrong")
    return 1 if wrong else 0


def main(arguments: Sequence[str] | None = None, reference: SideOfRank | None = None) -> int:
    """Run the command line; `reference` is the side of another implementation. Returns the exit code."""
    given = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    count = QUICK_ENTRIES if given.quick else GLOO_ENTRIES if given.gloo else None
    names = chosen(given.only, count, given.seed)
    if given.sizes:
        return compare_sizes(names, given.seed)
    sweeps = [Sweep(dtype, variant) for dtype in given.dtypes.split(",") for variant in given.variants.split(",")]
    full = sweeps == [Sweep()] and not given.gloo
    effort = REFERENCE if reference else FULL if full else FEWER
    on_gloo = reference or (Processes if given.gloo else None)
    outcomes: list[Outcome] = []
    start = time.monotonic()
    for sweep in sweeps:
        for number, outcome in enumerate(covered(names, effort, given.seed, sweep, on_gloo), 1):
            outcomes.append(outcome)
            what = f"{outcome.name} {' '.join(sweep) if sweep != Sweep() else ''}".strip()
            clock = f"{time.monotonic() - start:5.0f} s"
            print(f"{clock} {number}/{len(names)} {what}: {outcome.status}, {outcome.cases} cases", flush=True)
            for failure in outcome.failures:
                print(f"        {failure}", flush=True)
    if given.json:
        given.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes]))
    print(summary(outcomes))
    if full and count is None and not given.only:
        if reference:
            write_reference(outcomes)
        else:
            DOCUMENT.write_text(document(outcomes, read_reference(), FULL.samples, FULL.placements))
    return 1 if any(outcome.status in BAD for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
