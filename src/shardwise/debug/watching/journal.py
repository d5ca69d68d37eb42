"""The journal of a rank: a stream of events for each group of ranks, and a description of each event.

An event is a number of 62 bits: a digest of what is done, plus the position in the user's code. Digests do not depend
on Python's hash seed. The description of an event is stored when it first occurs.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from types import FrameType
from typing import NamedTuple

from ...sharding.source_lines import is_library, users_frame
from .places import line_of
from .stream import Stream, stream_key

_BITS = 60
_MOST = 1 << 16
"""The number of events whose descriptions are stored."""


class Event(NamedTuple):
    """The description of an event: what the rank did, and the user's line."""

    what: str
    line: str

    def __str__(self) -> str:
        return f"{self.what}\n      at {self.line}" if self.line else self.what


def digest(text: str) -> int:
    """Return a number of 60 bits that is the same for a text on all ranks."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> (64 - _BITS)


class Failing:
    """The error of the watch, once there is one. Its thread sets `failure`, and every event then raises it."""

    failure: Callable[[], BaseException] | None = None

    def check(self) -> None:
        """Raise the error, if there is one."""
        if self.failure is not None:
            raise self.failure()


class Journal:
    """All streams of this rank, and the descriptions of their events."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.streams: dict[str, Stream] = {}
        self.events: dict[int, Event] = {}
        self.last: Stream | None = None
        """The stream of the last collective: where this rank waits, if it waits."""
        self._by_ranks: dict[tuple[int, ...], Stream] = {}
        self._making = threading.Lock()

    def stream(self, ranks: tuple[int, ...]) -> Stream:
        """Return the stream of a group of ranks, made at first use."""
        found = self._by_ranks.get(ranks)
        if found is None:
            with self._making:
                ordered = tuple(sorted(ranks))
                key = stream_key(ordered)
                found = self.streams.get(key) or Stream(ordered)
                self.streams = {**self.streams, key: found}  # replaced, not changed: the other thread reads it
                self._by_ranks[ranks] = found
        return found

    def place(self, number: int, what: str, frame: FrameType | None) -> int:
        """Return the event of doing `what`, whose digest is `number`, at the user's line around a frame."""
        assert frame is not None
        outer = users_frame(frame)
        event = number + outer.f_lasti + (outer.f_code.co_firstlineno << 16)
        if event not in self.events:
            self.remember(event, Event(what, line_of(outer)))
        return event

    def place_of_call(self, number: int, what: str, caller: FrameType) -> int:
        """Return the event of an op whose first call is made by this frame.

        Finding the user's line for each op that a library calls would cost too much. Such an event has no position,
        and its description has the line of the first call.
        """
        if not is_library(caller.f_code.co_filename):
            return self.place(number, what, caller)
        event = number + 1
        if event not in self.events:
            self.remember(event, Event(what, line_of(users_frame(caller))))
        return event

    def remember(self, event: int, description: Event) -> None:
        """Store the description of an event."""
        if len(self.events) >= _MOST:
            for old in [*self.events][: _MOST // 2]:
                del self.events[old]
        self.events[event] = description

    def lookup(self, event: int | None) -> Event | None:
        """Return the description of an event; None for None."""
        return None if event is None else self.events.get(event) or Event("an event whose description is forgotten", "")

    def roll(self) -> None:
        """Bring the fingerprints of all streams up to date."""
        for stream in self.streams.values():
            stream.roll()
