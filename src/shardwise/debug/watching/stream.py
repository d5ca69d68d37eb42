"""The events of one group of ranks, in order, as numbers: ranks that agree have the same numbers.

The main thread appends a number for each event, which costs about 10 ns. The thread of the watch rolls new events into
one fingerprint from time to time. Two ranks at different positions are compared at the position of the one that is
behind: each stores its events, and so can compute its fingerprint at an earlier position.

>>> stream = Stream((0, 1))
>>> stream.append(7)
>>> stream.roll()
>>> stream.count, stream.fingerprint_at(1) == stream.fingerprint
(1, True)
"""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

REMEMBERED = 1 << 18
"""The number of events of a stream that a rank stores."""


class _Piece(NamedTuple):
    """Events that were rolled in at once, and the state of the fingerprint before them."""

    start: int
    before: hashlib.blake2b
    events: array[int]


class Stream:
    """The events of one group of ranks on this rank."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.key = stream_key(ranks)
        self.met: set[int] = set()
        """The events of collectives that are not new: ranks have waited for each other before them."""
        self.meetings = self.missed = 0
        self._new: list[int] = []
        self.append = self._new.append
        self.count = 0
        """The number of events that are rolled into the fingerprint."""
        self._state = hashlib.blake2b(digest_size=8)
        self._pieces: deque[_Piece] = deque()

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the first `count` events."""
        return self._state.hexdigest()

    def roll(self) -> None:
        """Roll the new events into the fingerprint. The main thread may append meanwhile."""
        size = len(self._new)
        if not size:
            return
        events = array("Q", self._new[:size])
        del self._new[:size]
        self._pieces.append(_Piece(self.count, self._state.copy(), events))
        self._state.update(events.tobytes())
        self.count += size
        while self.count - self._pieces[0].start - len(self._pieces[0].events) > REMEMBERED:
            self._pieces.popleft()

    def fingerprint_at(self, count: int) -> str | None:
        """Return the fingerprint of the first `count` events; None if there are fewer, or they are discarded."""
        if count == self.count:
            return self.fingerprint
        for start, before, events in reversed(self._pieces):
            if start <= count < start + len(events):
                state = before.copy()
                state.update(events[: count - start].tobytes())
                return state.hexdigest()
        return None

    def events_from(self, first: int) -> tuple[int, Sequence[int]]:
        """Return the position of the first stored event at or after `first`, and the events from there on."""
        found = array("Q")
        begin = max(first, self._pieces[0].start) if self._pieces else self.count
        for start, _, events in self._pieces:
            if start + len(events) > begin:
                found.extend(events[max(0, begin - start) :])
        return begin, found

    def event_at(self, index: int) -> int | None:
        """Return the event at a position; None if there is none yet, or it is discarded."""
        start, events = self.events_from(index)
        return events[0] if start == index and len(events) else None


def stream_key(ranks: Sequence[int]) -> str:
    """Return a short name of a set of ranks, the same on all of them."""
    return hashlib.blake2b(",".join(map(str, ranks)).encode(), digest_size=6).hexdigest()
