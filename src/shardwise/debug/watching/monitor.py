"""The thread of the watch: it publishes where this rank is, compares that with other ranks, and stops the program.

Each rank compares itself with its neighbours in every group, so that the work for a rank does not grow with the number
of ranks. The first rank that finds a problem publishes it on the board, which all ranks read.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Unpack

from ..._torch.watching import store_port
from ...errors import WatchError
from . import words
from .board import Board, StoreGoneError, is_alive, this_machine
from .hooks import Hooks
from .inquiry import Inquiry
from .journal import Journal, digest
from .places import line_of_thread
from .status import Pulse, Status
from .stopping import Stopper, end_collectives
from .stream import Stream
from .words import Failure

log = logging.getLogger("shardwise.watch")

DEADLOCK_AFTER = 3.0
"""Seconds without any event on any rank after which ranks that wait for each other are an error."""


_MEETING = 5.0
"""Seconds for which ranks wait for each other before a new collective."""
_MISSED = 3
"""After so many meetings that some rank did not reach in time, a group holds no more."""
_MEETINGS = 1000
"""After so many meetings a group holds no more: a program may have new shapes in every step."""


class Monitor(threading.Thread):
    """The thread that watches one rank, until all ranks have left or something went wrong."""

    def __init__(
        self, rank: int, size: int, epoch: int, journal: Journal, hooks: Hooks, every: float, stuck_after: float
    ) -> None:
        super().__init__(name="shardwise watch", daemon=True)
        self.rank, self.size, self.journal, self.hooks = rank, size, journal, hooks
        self.board, self._port = Board(epoch), store_port()
        self.error: WatchError | None = None
        self.over = threading.Event()
        """Set when all ranks have left, or when this rank has the error."""
        self.main_knows = False
        """Whether the watched thread has got the error, or is about to ask for it."""
        self.stopper = Stopper(self.make_error, (f"{__package__}.watch",))
        self._every, self._stuck_after = every, stuck_after
        self._status, self._pulse = Status(), Pulse()
        self._moved, self._reported = time.monotonic(), False
        self._agreed: dict[tuple[str, int], int] = {}
        self._host: Status | None = None
        self._leaving, self._stage = False, 0
        self._alive = size
        self._wake = threading.Event()
        self._lock = threading.Lock()

    def make_error(self) -> WatchError | None:
        """Return a new error that says what went wrong; None as long as nothing has."""
        found = self.error
        if found is None:
            return None
        self.main_knows = True
        return WatchError(found.problem, found.fix, found.ranks)

    # ---- the thread -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Publish and compare until it is over."""
        while not self.over.is_set():
            try:
                self._compare()
            except StoreGoneError:
                self._store_is_gone()
            self._wake.wait(0.02 if self._leaving else self._every)
            self._wake.clear()

    def _compare(self) -> None:
        self._publish()
        neighbours = self._neighbours()
        found = self.board.read(["failure", *(f"status/{rank}" for rank in neighbours)])
        if "failure" in found:
            self._fail(found["failure"])
            return
        statuses = {rank: Status(**found[f"status/{rank}"]) for rank in neighbours if f"status/{rank}" in found}
        gone = [rank for rank, status in statuses.items() if not status.left and self._pulse.is_gone(rank, status)]
        if gone:
            self._declare(kind="gone", ranks=gone)
            return
        self._host = statuses.get(0, self._host)
        if not any(self._differs(stream, rank, statuses) for stream, rank in self._pairs(statuses)):
            self._go_on()

    def _go_on(self) -> None:
        """Leave if this rank leaves, and log where ranks are if there is no progress; nothing is wrong."""
        if self._leaving:
            self._leave_further()
            return
        idle = time.monotonic() - self._moved
        if idle > DEADLOCK_AFTER and self.rank == 0:
            self._look_for_deadlock()
        if idle > self._stuck_after and not self._reported:
            self._report()

    def _leave_further(self) -> None:
        """Do the next stage of leaving: publish it; once all ranks leave, compare again; once all have, end."""
        if self._stage == 0:
            self._status.left = True
            self._publish()
            self.board.count("left", 1)
        elif (self._stage == 1 and self.board.count("left") < self.size) or (
            self._stage == 3 and self.board.count("done") < self.size
        ):
            return
        elif self._stage == 2:  # the comparison just before this read the last status of every rank
            self.board.count("done", 1)
        elif self._stage == 3:
            self.over.set()
        self._stage += 1

    def _publish(self) -> None:
        status, journal, now = self._status, self.journal, time.monotonic()
        with self._lock:
            journal.roll()
        streams = {key: [stream.count, stream.fingerprint] for key, stream in journal.streams.items()}
        if streams != status.streams:
            self._moved, self._reported = now, False
        status.beat, status.streams, status.idle = status.beat + 1, streams, now - self._moved
        status.line, status.waits, status.doing = "", False, ""
        if status.idle > min(0.5, self._stuck_after):
            status.line, status.waits = line_of_thread(self.stopper.thread)
            last = journal.last
            status.last, status.group = (last.key, list(last.ranks)) if last is not None else ("", [])
            event = journal.lookup(last.event_at(last.count - 1)) if last is not None and last.count else None
            status.doing = event.what if event is not None else ""
        self.board.write(f"status/{self.rank}", status.as_json())

    # ---- comparing --------------------------------------------------------------------------------------------------

    def _neighbours(self) -> list[int]:
        near = {(self.rank - 1) % self.size, (self.rank + 1) % self.size}
        for stream in self.journal.streams.values():
            at = stream.ranks.index(self.rank)
            near |= {stream.ranks[at - 1], stream.ranks[(at + 1) % len(stream.ranks)]}
        return sorted(near - {self.rank})

    def _pairs(self, statuses: dict[int, Status]) -> list[tuple[Stream, int]]:
        return [(s, rank) for s in self.journal.streams.values() for rank in statuses if rank in s.ranks]

    def _differs(self, stream: Stream, rank: int, statuses: dict[int, Status]) -> bool:
        """Return whether another rank, which is not ahead of this one, did something else.

        If so, publish the difference.
        """
        status, key = statuses[rank], (stream.key, rank)
        count, theirs = status.streams.get(stream.key, (0, ""))
        mine = stream.fingerprint_at(count) if count else theirs
        agreed = self._agreed.get(key, 0)
        if mine is not None and mine == theirs:
            self._agreed[key] = agreed = count
        elif mine is not None:
            self._declare(kind="differs", stream=stream.key, by=self.rank, other=rank, agreed=agreed)
            return True
        if status.left and not count and stream.count and not self._leaving:
            self._declare(kind="differs", stream=stream.key, by=self.rank, other=rank, agreed=0)
            return True
        return False

    # ---- ranks that do not go on ------------------------------------------------------------------------------------

    def _all(self) -> dict[int, Status]:
        found = self.board.read(f"status/{rank}" for rank in range(self.size))
        return {int(name.partition("/")[2]): Status(**status) for name, status in found.items()}

    def _look_for_deadlock(self) -> None:
        statuses = self._all()
        stuck = len(statuses) == self.size and all(
            status.idle > DEADLOCK_AFTER and status.waits and status.last for status in statuses.values()
        )
        if stuck and all(_waits_for_others(status, statuses) for status in statuses.values()):
            self._declare(kind="deadlock", statuses={str(rank): status.as_json() for rank, status in statuses.items()})

    def _report(self) -> None:
        """Log where all ranks are, once. The first of the ranks that make no progress does it."""
        self._reported = True
        statuses = self._all()
        idle = [rank for rank, status in statuses.items() if status.idle > self._stuck_after]
        if self.rank == min(idle, default=self.rank):
            log.warning("no progress for %.0f s:\n%s", self._stuck_after, words.waiting(statuses))

    # ---- when something is wrong ------------------------------------------------------------------------------------

    def _declare(self, **failure: Unpack[Failure]) -> None:
        if failure["kind"] == "gone":  # other ranks of this machine may be gone, too
            others, here = self._all(), this_machine()
            dead = [r for r, s in others.items() if s.machine == here and not s.left and not is_alive(s.pid)]
            failure["ranks"] = sorted({*failure["ranks"], *dead})
        self.board.write_first("failure", failure)
        self._fail(self.board.read_one("failure"))

    def raised(self, error: str, line: str) -> None:
        """Publish an error of this rank, so that the others stop."""
        try:
            self.board.write_first("failure", {"kind": "raised", "rank": self.rank, "error": error, "line": line})
        except StoreGoneError:
            return
        self._wake.set()

    def _fail(self, failure: Failure) -> None:
        kind = failure["kind"]
        if kind == "raised":
            error = words.raised(failure)
        elif kind == "gone":
            error = words.gone(failure["ranks"])
            self._alive = self.size - len(failure["ranks"])
        elif kind == "deadlock":
            error = words.deadlock({int(rank): Status(**status) for rank, status in failure["statuses"].items()})
        else:
            error = Inquiry(self.rank, self.board, self.journal, self.stopper.thread).ask(failure)
        self.board.count("notified", 1)
        self._stop_program(error)

    def _store_is_gone(self) -> None:
        host = self._host
        if self._leaving or (host is not None and host.left):
            self.over.set()  # the program ends, and rank 0 was quicker
            return
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            self._stop_program(words.gone([], "the launcher, which runs the store, has ended"))
            return
        self._stop_program(words.gone([0], "the store, which its process runs, does not answer"))

    def _stop_program(self, error: WatchError) -> None:
        self.error = error
        self.hooks.fail(lambda: self.make_error() or error)
        self.over.set()
        if not self.main_knows:
            self.stopper.interrupt()
        end_collectives(self._port)

    # ---- called by the watched thread -------------------------------------------------------------------------------

    def meet(self, stream: Stream) -> None:
        """Wait until all ranks of a group are about to begin the same collective, or something went wrong.

        Ranks meet under a name made of the fingerprints of the group and of all groups that contain it, so only ranks
        with the same history meet. They wait before new collectives only, of which most programs soon have no more, and
        not for long, since a rank may just be slow.
        """
        if stream.meetings >= _MEETINGS or stream.missed >= _MISSED:
            return
        stream.meetings += 1
        with self._lock:
            self.journal.roll()
            members = {*stream.ranks}
            ways = [f"{s.count} {s.fingerprint}" for s in self.journal.streams.values() if members <= {*s.ranks}]
        name = f"meet/{stream.key}/{digest(' '.join(sorted(ways))):x}"
        pause, deadline = 0.0005, time.monotonic() + _MEETING
        self._wake.set()
        try:
            count = self.board.count(name, 1)
            while count < len(stream.ranks) and not self.over.is_set():
                if time.monotonic() > deadline:
                    stream.missed += 1
                    return
                time.sleep(pause)
                pause = min(2 * pause, 0.02)
                count = self.board.count(name)
        except StoreGoneError:
            return  # the thread of the watch finds that out, too

    def leave(self, limit: float | None) -> None:
        """Leave the watch: wait until all ranks leave, something went wrong, or `limit` seconds have passed."""
        self._leaving = True
        self._wake.set()
        deadline = None if limit is None else time.monotonic() + limit
        while not self.over.wait(0.1) and (deadline is None or time.monotonic() < deadline):
            pass
        self.over.set()

    def finish(self) -> None:
        """Wait for the thread to end: it may still be ending collectives, and must not end those of new groups."""
        self._wake.set()
        if self.is_alive() and threading.current_thread() is not self:
            self.join(10.0)

    def wait_until_notified(self, limit: float) -> None:
        """Wait until all ranks that are alive know what went wrong: the store may end with this process."""
        deadline = time.monotonic() + limit
        try:
            while self.board.count("notified") < self._alive and time.monotonic() < deadline:
                time.sleep(0.05)
        except StoreGoneError:
            pass


def _waits_for_others(status: Status, statuses: dict[int, Status]) -> bool:
    """Return whether a rank is in a collective that another rank of its group has not begun."""
    key = status.last
    begun = [statuses[rank].streams.get(key, [0])[0] for rank in status.group]
    return min(begun) < status.streams[key][0]
