"""Tables for the terminal and for benchmarks/README.md, timing, and the description of the machine."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

README = Path(__file__).parents[1] / "README.md"


class Report:
    """Collects the paragraphs and tables of one benchmark, prints them, and puts them in its section of the README.

    The section is between `<!-- NAME -->` and `<!-- /NAME -->`. With `--print` on the command line it is left alone.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.parts: list[str] = []
        self.add(machine())

    def add(self, text: str) -> None:
        print(text + "\n", flush=True)
        self.parts.append(text)

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table; its first column is text, the others are numbers."""
        lines = [header, *rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(header))]

        def line(cells: Sequence[str]) -> str:
            padded = [c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
            return f"| {' | '.join(padded)} |"

        rule = "|".join("-" * (w + 1) + ":" if i else "-" * (w + 2) for i, w in enumerate(widths))
        self.add("\n".join([f"**{title}**", "", line(header), f"|{rule}|", *map(line, rows)]))

    def save(self) -> None:
        if "--print" in sys.argv:
            return
        start, end = f"<!-- {self.name} -->", f"<!-- /{self.name} -->"
        before, _, rest = README.read_text().partition(start)
        _, found, after = rest.partition(end)
        if not found:
            raise SystemExit(f"{README} has no part from {start} to {end}")
        README.write_text("\n\n".join([before + start, *self.parts, end + after]))


def machine() -> str:
    """CPU, cores, Python and torch."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
        cores = sum(line.startswith("processor") for line in lines)
        cpu = f"{model}, {cores} cores"
    except (OSError, StopIteration):
        cpu = platform.processor() or platform.machine()
    return f"Machine: {cpu}; Python {platform.python_version()}, torch {torch.__version__}, one thread."


def microseconds(*calls: Callable[[], object], number: int = 100, repeats: int = 40) -> list[float]:
    """The time of each call: the best mean of several runs, which the machine's other work disturbs least.

    The calls take turns, so that they meet the same disturbances.
    """
    best = [float("inf")] * len(calls)
    for _ in range(repeats):
        for i, call in enumerate(calls):
            start = time.perf_counter()
            for _ in range(number):
                call()
            best[i] = min(best[i], (time.perf_counter() - start) / number)
    return [seconds * 1e6 for seconds in best]
