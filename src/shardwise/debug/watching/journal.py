"""The journal of a rank: a stream of events for each group of ranks, and what each event was, in words.

An event is a number of 62 bits: a digest of what is done, plus the position in the user's code. Digests do not depend
on Python's hash seed. What an event was is written down when it is met first.
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
"""The number of events whose words are kept."""


class Event(NamedTuple):
    """What a rank did, in words, and the user's line."""

    what: str
    line: str

    def __str__(self) -> str:
        return f"{self.what}\n      at {self.line}" if self.line else self.what


def digest(text: str) -> int:
    """A number of 60 bits that is the same for a text on all ranks."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> (64 - _BITS)


class Failing:
    """What went wrong, once something has. The thread of the watch sets it; whatever would be an event raises it."""

    failure: Callable[[], BaseException] | None = None

    def check(self) -> None:
        """Raise what went wrong, if anything has."""
        if self.failure is not None:
            raise self.failure()


class Journal:
    """All streams of this rank, and the words for their events."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.streams: dict[str, Stream] = {}
        self.events: dict[int, Event] = {}
        self.last: Stream | None = None
        """The stream of the last collective: where this rank waits, if it waits."""
        self._by_ranks: dict[tuple[int, ...], Stream] = {}
        self._making = threading.Lock()

    def stream(self, ranks: tuple[int, ...]) -> Stream:
        """The stream of a group of ranks."""
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
        """The event of doing something, whose digest is `number`, at the user's line around a frame."""
        assert frame is not None
        outer = users_frame(frame)
        event = number + outer.f_lasti + (outer.f_code.co_firstlineno << 16)
        if event not in self.events:
            self.remember(event, Event(what, line_of(outer)))
        return event

    def place_of_call(self, number: int, what: str, caller: FrameType) -> int:
        """The event of an op that is called from a frame, which is met first there.

        To look for the user's line at each op that a library calls would cost too much. Such an event has no position,
        and in words the line where it was met first.
        """
        if not is_library(caller.f_code.co_filename):
            return self.place(number, what, caller)
        event = number + 1
        if event not in self.events:
            self.remember(event, Event(what, line_of(users_frame(caller))))
        return event

    def remember(self, event: int, said: Event) -> None:
        """Write down what an event was."""
        if len(self.events) >= _MOST:
            for old in [*self.events][: _MOST // 2]:
                del self.events[old]
        self.events[event] = said

    def said(self, event: int | None) -> Event | None:
        """What an event was."""
        return None if event is None else self.events.get(event) or Event("an event whose words are forgotten", "")

    def roll(self) -> None:
        """Bring the fingerprints of all streams up to date."""
        for stream in self.streams.values():
            stream.roll()
