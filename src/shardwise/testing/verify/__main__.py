"""Verify that every rule gives the one-device answer with every placement it allows."""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence

from ..samples import names
from .children import verify_all, work
from .entry import FULL, QUICK, Effort
from .summary import summary

QUICK_ENTRIES = 24


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m shardwise.testing.verify", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few entries, few placements")
    parser.add_argument("--only", metavar="NAME", help="entries whose name contains this")
    parser.add_argument("--limit", type=int, help="placements of each sample on each mesh")
    parser.add_argument("--seed", type=int, default=0, help="chooses samples and placements")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.child:
        *values, seed = json.loads(given.child)
        values[2] = tuple(map(tuple, values[2]))
        work(Effort(*values), seed)
        return 0
    effort = QUICK if given.quick else FULL
    if given.limit:
        effort = effort._replace(limit=given.limit)
    chosen = [name for name in names() if not given.only or given.only in name]
    if given.quick and not given.only:
        chosen = random.Random(given.seed).sample(chosen, QUICK_ENTRIES)
    reports, start = [], time.monotonic()
    for report in verify_all(chosen, effort, given.seed):
        reports.append(report)
        clock = f"{time.monotonic() - start:5.0f} s"
        print(f"{clock} {len(reports)}/{len(chosen)} {report.entry}: {report.status}, {report.cases} cases", flush=True)
    print(summary(reports, by_rule=not given.quick))
    return 1 if any(report.failures for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
