"""The status that each rank publishes periodically, and the test whether a rank that stopped doing so is gone."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import Any

from .board import is_alive, this_machine

SILENT = 10.0
"""Seconds after which a rank of another machine that publishes nothing counts as gone."""


@dataclass
class Status:
    """One rank: its position in each stream, and for how long, and where, it has made no progress."""

    beat: int = 0
    pid: int = field(default_factory=os.getpid)
    machine: str = field(default_factory=this_machine)
    streams: dict[str, list[Any]] = field(default_factory=dict)
    """The number of events and their fingerprint, by stream."""
    last: str = ""
    """The stream of the last collective of an idle rank."""
    group: list[int] = field(default_factory=list)
    """The ranks of that collective."""
    doing: str = ""
    """The last collective, as text."""
    idle: float = 0.0
    """Seconds since the last event."""
    line: str = ""
    """The user's line, of a rank that is idle."""
    waits: bool = False
    """Whether an idle rank is inside a library, and not in the user's own code."""
    left: bool = False
    """Whether it has left the watch."""

    def as_json(self) -> dict[str, Any]:
        """Return the fields as values of JSON."""
        return dict(vars(self))


class Pulse:
    """When each rank last published its status, by this rank's clock."""

    def __init__(self) -> None:
        self._published: dict[int, tuple[int, float]] = {}

    def is_gone(self, rank: int, status: Status) -> bool:
        """Return whether the process of a rank has ended without leaving the watch."""
        now = time.monotonic()
        beat, since = self._published.get(rank, (-1, now))
        if beat != status.beat:
            self._published[rank] = status.beat, now
            return False
        if status.machine and status.machine == this_machine():
            return not is_alive(status.pid)
        return now - since > SILENT
