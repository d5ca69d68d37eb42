"""The command line of the random programs.

    python -m shardwise.testing.fuzz                           1,000 programs
    python -m shardwise.testing.fuzz --programs 20000 --jobs 2
    python -m shardwise.testing.fuzz --programs 300 --gloo     on four processes, against the simulated world
    python -m shardwise.testing.fuzz --seed 1234 --programs 1  one program
    python -m shardwise.testing.fuzz --ignore stride,offset    kinds of differences that do not count

The exit code is 1 if a program failed. Each is printed as a script, shrunk, with its seed.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.progress import Progress

from .batch import Report, run_all
from .compare import KINDS
from .processes import run_on_gloo


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m shardwise.testing.fuzz")
    parser.add_argument("--programs", type=int, default=1000, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of the first program; the others follow")
    parser.add_argument("--gloo", action="store_true", help="on four processes, bit by bit as in the simulated world")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--ignore", default="", help=f"kinds of differences, of {', '.join(KINDS)}")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    ignored = [kind for kind in given.ignore.split(",") if kind]
    seeds = range(given.seed, given.seed + given.programs)
    kinds: Counter[str] = Counter()
    console = Console(highlight=False, soft_wrap=True)
    with Progress(console=console) as progress:
        task = progress.add_task("programs", total=given.programs)
        for answer in run_on_gloo(seeds) if given.gloo else run_all(seeds, ignored, given.jobs):
            progress.advance(task, answer.programs)
            for report in answer.reports:
                kinds[report.failure.kind] += 1
                console.print(text_of(report), markup=False)
    good = "all as in the simulated world" if given.gloo else "all as on one device"
    failed = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()) or good
    console.print(f"{given.programs} programs from seed {given.seed}: {failed}")
    return 1 if kinds else 0


def text_of(report: Report) -> str:
    """Return a report as a script with comments."""
    comment = f"seed {report.seed}: {report.failure}"
    if report.history:
        comment += f"\nonly after the programs with the seeds {list(report.history)}"
    return report.program.script(comment)


if __name__ == "__main__":
    sys.exit(main())
