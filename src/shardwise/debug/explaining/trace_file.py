"""Spans as a file in the format of Chrome's trace viewer, which Perfetto reads as well."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from .timeline import Span


def trace_events(spans: Sequence[Span]) -> list[dict[str, object]]:
    """Return the events of a trace: a process for each rank, with a track for ops and one for each set of axes."""
    tracks = ["compute", *dict.fromkeys(span.track for span in spans if span.track != "compute")]
    number = {track: index for index, track in enumerate(tracks)}
    named: list[dict[str, object]] = []
    for rank in sorted({span.rank for span in spans}):
        named.append(_name("process_name", rank, 0, f"rank {rank}"))
        used = {span.track for span in spans if span.rank == rank}
        named += [
            _name("thread_name", rank, number[t], t if t == "compute" else f"over {t}") for t in tracks if t in used
        ]
    return named + [
        {
            "name": span.name,
            "cat": "compute" if span.track == "compute" else "communication",
            "ph": "X",
            "ts": span.start * 1e6,
            "dur": (span.end - span.start) * 1e6,
            "pid": span.rank,
            "tid": number[span.track],
            "args": dict(span.about),
        }
        for span in spans
    ]


def _name(kind: str, rank: int, track: int, name: str) -> dict[str, object]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": track, "args": {"name": name}}


def write_events(path: str | Path, events: Sequence[dict[str, object]]) -> Path:
    """Write a trace file."""
    target = Path(path)
    target.write_text(json.dumps({"traceEvents": list(events), "displayTimeUnit": "ms"}))
    return target
