"""Traces for chrome://tracing and ui.perfetto.dev: compute and communication of each rank and axis.

>>> with trace("step.json"):
...     model(x).sum().backward()

Simulated ranks are in one file, with modelled times. A process writes a file of its own, `step.rank3.json`, with
measured times; `merge_traces` joins the files of all ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .explaining.explain import Explanation
from .explaining.trace_file import write_events


@contextmanager
def trace(path: str | Path, **speeds: float) -> Iterator[Explanation]:
    """Write a trace of the block to a JSON file. `speeds` are those of `Explanation.trace`.

    Yields the explanation of the block.

    >>> with trace(folder / "step.json"):
    ...     y = x.redistribute(placements=P())
    """
    with Explanation() as explanation:
        yield explanation
    explanation.trace(path, **speeds)


def merge_traces(paths: Iterable[str | Path], path: str | Path) -> Path:
    """Write the events of several trace files to one, and return its path.

    >>> with trace(folder / "step.json"):
    ...     y = x.redistribute(placements=P())
    >>> merge_traces([folder / "step.json"], folder / "all.json").name
    'all.json'
    """
    events: list[dict[str, object]] = []
    for each in paths:
        events += json.loads(Path(each).read_text())["traceEvents"]
    return write_events(path, events)
