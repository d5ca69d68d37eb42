"""watch: stop all ranks within seconds when they disagree, when one raises, and when one dies.

>>> with shardwise.debug.watch():
...     train()
WatchError: ranks 0-3 disagree about call 17 of those they make together:
  rank 1: all_reduce (sum) of float32[64] among ranks 0, 1, 2, 3 (over tp)
      at train.py:31   loss = loss.full_tensor()
  ranks 0, 2, 3: aten.mul.Tensor(f32[8@tp, 16], 2) on mesh(tp=4)
      at train.py:29   x = x * 2
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import TracebackType

import torch.distributed as dist

from ...errors import WatchError, WorldError
from ...sharding.runtime import Runtime, WorldState, on_activate, runtime_of_world
from ...sharding.source_lines import users_frame
from ...world import current_world
from .hooks import Hooks
from .journal import Event, Journal, digest
from .monitor import Monitor
from .places import line_of, line_of_error

_EPOCHS: WorldState[list[int]] = WorldState(list)
_BACKENDS_ALONE = frozenset(("fake",))
_running: list[Watch] = []


def watch(*, ops: bool = True, every: float = 0.25, stuck_after: float = 30.0) -> Watch:
    """Watch all ranks from here on: call it on all of them, after `init_process_group`.

    Used in a `with` statement it ends with the block, where ranks wait for each other; otherwise with the process
    group or the program. Ranks compare what they do through the store of the process group: ops on distributed tensors
    with their specs, collectives, the state of generators, and the lines of the program that call them. If they
    differ, if one rank raises an error, or if one is gone, all ranks raise a `WatchError` within seconds. By then
    their process groups have been ended: the program cannot go on.

    Args:
        ops: whether ops that communicate nothing are compared, too
        every: the seconds between two comparisons
        stuck_after: the seconds without progress after which the log says where each rank is

    In a simulated world, where ranks cannot disagree, it does nothing.

    >>> with watch():
    ...     model(torch.ones(2, 4)).sum().backward()
    """
    if current_world() is not None:
        return Watch()
    if not dist.is_initialized():
        raise WorldError("watch() needs a process group", "call it after torch.distributed.init_process_group")
    if _running:  # it reports errors in this block as well
        return _running[0].again()
    found = Watch()
    if dist.get_world_size() > 1 and dist.get_backend() not in _BACKENDS_ALONE:
        found.start(ops, every, stuck_after)
    return found


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Let one rank run ops on distributed tensors alone, as for a log. Collectives are still compared.

    >>> with unwatched():
    ...     if dist.get_rank() == 0:
    ...         log(x.to_local().norm())                    # the other ranks do not call this
    """
    hooks = _running[0].hooks if _running else None
    if hooks is None or not hooks.ops:
        yield
        return
    hooks.ignore_ops()
    try:
        yield
    finally:
        if hooks.failing.failure is None:
            hooks.observe_ops()


class Watch:
    """A running watch. The end of its `with` block, or `stop()`, ends it."""

    def __init__(self) -> None:
        self.hooks: Hooks | None = None
        self._monitor: Monitor | None = None
        self._depth = 1
        self._hook_before: Callable[..., object] | None = None

    def start(self, ops: bool, every: float, stuck_after: float) -> None:
        """Begin to watch."""
        epochs = _EPOCHS.of(runtime_of_world())
        epochs.append(len(epochs))
        rank, size = dist.get_rank(), dist.get_world_size()
        journal = Journal(rank)
        journal.stream(tuple(range(size)))
        self.hooks = Hooks(journal, ops)
        self._monitor = Monitor(rank, size, epochs[-1], journal, self.hooks, every, stuck_after)
        self.hooks.install(self.stop, self._monitor.meet)
        _running.append(self)
        self._hook_before = sys.excepthook
        sys.excepthook = self._uncaught
        atexit.register(self._at_exit)
        self._monitor.start()

    def again(self) -> Watch:
        """Return this watch, for a `with` block inside its own."""
        self._depth += 1
        return self

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, GeneratorExit):
            self._depth -= 1
            if not self._depth:
                self.stop()
            return
        self._depth = 0
        found = self._explain(error)
        self._end()
        if found is not None and not isinstance(error, WatchError):
            raise found from error

    def stop(self, limit: float | None = None) -> None:
        """End the watch once all ranks call this. Raises whatever error the watch finds until then."""
        monitor = self._monitor
        if monitor is None or self.hooks is None:
            return
        if not monitor.over.is_set():
            event, frame = digest("leave"), users_frame(sys._getframe(1))
            self.hooks.journal.remember(event, Event("leave the watch, or end the program", line_of(frame)))
            self.hooks.remove()
            for stream in self.hooks.journal.streams.values():
                stream.append(event)
            monitor.leave(limit)
        error = monitor.make_error()
        self._end()
        if error is not None:
            raise error

    def _explain(self, error: BaseException) -> WatchError | None:
        """Return the error to raise in place of one that ends this rank; None to keep its own, which is published."""
        monitor = self._monitor
        if monitor is None:
            return None
        known = monitor.error is None and not isinstance(error, WatchError)
        if known and _is_echo(error):  # the cause is on another rank, which will publish it
            monitor.over.wait(12.0)
        elif known:
            monitor.main_knows = True
            monitor.raised(f"{type(error).__name__}: {error}", line_of_error(error))
            monitor.over.wait(3.0)
        if monitor.error is not None:
            monitor.wait_until_notified(3.0)
        found = monitor.make_error()
        return None if found is None or (known and not _is_echo(error)) else found

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before = self._hook_before or sys.__excepthook__
        found = self._explain(error) if threading.current_thread() is threading.main_thread() else None
        if found is not None and not isinstance(error, WatchError):
            found.__cause__ = error.with_traceback(trace)
            kind, error, trace = type(found), found, None
        before(kind, error, trace)

    def _at_exit(self) -> None:
        monitor = self._monitor
        if monitor is None:
            return
        with contextlib.suppress(WatchError):
            self.stop(limit=5.0)
        if monitor.error is not None:
            monitor.wait_until_notified(3.0)

    def _end(self) -> None:
        """Remove the hooks, and end the thread of the watch."""
        if self.hooks is None or self._monitor is None:
            return
        self.hooks.remove()
        self._monitor.over.set()
        self._monitor.finish()
        if threading.current_thread() is threading.main_thread():
            self._monitor.stopper.restore()
        if sys.excepthook == self._uncaught:
            sys.excepthook = self._hook_before or sys.__excepthook__
        atexit.unregister(self._at_exit)
        if self._monitor.error is not None:
            atexit.register(self._monitor.wait_until_notified, 3.0)
        if self in _running:
            _running.remove(self)
        self._monitor = None


def _is_echo(error: BaseException) -> bool:
    """Return whether an error may only be the consequence of another rank that ended."""
    text = str(error)
    return isinstance(error, RuntimeError) and any(
        sign in text for sign in ("onnection closed", "onnection reset", "gloo", "roken pipe", "NCCL", "ProcessGroup")
    )


def watch_from_environment() -> None:
    """Watch all worlds of this program if SHARDWISE_WATCH=1; SHARDWISE_WATCH=collectives leaves out ops."""
    asked = os.environ.get("SHARDWISE_WATCH", "")
    if asked in ("", "0"):
        return

    def start(runtime: Runtime) -> None:
        real = current_world() is None and dist.is_initialized() and not _running
        if real and dist.group.WORLD is not None and dist.get_world_size() > 1:
            watch(ops=asked != "collectives")

    on_activate(start)
