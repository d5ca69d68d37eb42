"""Find out what each rank did at the event where two ranks disagree."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from typing import Any

from ...errors import WatchError
from .board import Board
from .journal import Journal
from .places import line_of_thread
from .words import Failure, disagreement

_PATIENCE = 1.5
"""Seconds to wait for answers: ranks that are alive answer sooner, since their watch has a thread of its own."""
_ON_THE_WAY = 0.5
"""Seconds that a rank which is behind gets to reach the event in question."""


class Inquiry:
    """Compares the events of the two ranks that differ, then collects the event of every rank of the group."""

    def __init__(self, rank: int, board: Board, journal: Journal, thread: int) -> None:
        self.rank, self.board, self.journal, self._thread = rank, board, journal, thread

    def ask(self, failure: Failure) -> WatchError:
        """Return the error, the same on all ranks."""
        stream = self.journal.streams.get(failure["stream"])
        parties = [failure["by"], failure["other"]]
        if stream is not None and self.rank in parties:
            stream.roll()
            start, events = stream.events_from(failure["agreed"])
            self.board.write(f"events/{self.rank}", [start, array("Q", events).tobytes().hex()])
        elif self.rank in parties:
            self.board.write(f"events/{self.rank}", [0, ""])
        found = self.board.wait_for([f"events/{rank}" for rank in parties], _PATIENCE)
        index = first_difference(*found.values()) if len(found) == 2 else failure["agreed"]
        if stream is not None:
            self.board.write(f"event/{self.rank}", self._own_event(index, failure["stream"]))
            self.board.write(f"ranks/{failure['stream']}", list(stream.ranks))
        members = self.board.wait_for([f"ranks/{failure['stream']}"], _PATIENCE)
        ranks = next(iter(members.values()), parties)
        if stream is None and self.rank in ranks:
            self.board.write(f"event/{self.rank}", self._own_event(index, failure["stream"]))
        own_events = self.board.wait_for([f"event/{rank}" for rank in ranks], _PATIENCE)
        return disagreement(index, ranks, {int(name.partition("/")[2]): each for name, each in own_events.items()})

    def _own_event(self, index: int, key: str) -> dict[str, str | None]:
        """Return what this rank did at a position of a stream, or the line that it is at if it did not get there."""
        stream = self.journal.streams.get(key)
        deadline = time.monotonic() + _ON_THE_WAY
        while stream is not None and stream.count <= index and time.monotonic() < deadline:
            time.sleep(0.02)  # a rank that is behind may be about to get there
            stream.roll()
        event = self.journal.lookup(stream.event_at(index)) if stream is not None else None
        if event is None:
            return {"what": None, "line": line_of_thread(self._thread)[0]}
        return {"what": event.what, "line": event.line}


def first_difference(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the position of the first event that differs. A side is `[position of its first event, events in hex]`."""
    start = max(one[0], other[0])
    mine, theirs = _numbers(one, start), _numbers(other, start)
    for index, (a, b) in enumerate(zip(mine, theirs, strict=False)):
        if a != b:
            return start + index
    return start + min(len(mine), len(theirs))


def _numbers(events: Sequence[Any], start: int) -> Sequence[int]:
    found = array("Q")
    found.frombytes(bytes.fromhex(events[1]))
    return found[start - events[0] :]
