"""Time that functions take where they are called, in the middle of a program.

The hooks of the watch take a hundredth of a step, and steps on processes vary by more than that. So their time is not
the difference between steps: each call is timed. The clock is read twice a call, which is part of the time.

A timed hook finds its caller one frame further away, through a Python function in the place of `sys._getframe`. What
this function costs is seen by calling one more of its kind (`detour=True`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

from shardwise._torch.watching import functional_collectives
from shardwise.debug.watching import op_events
from shardwise.dispatch.observe import LOOKUPS, Lookup
from shardwise.sharding import source_lines
from shardwise.tensor.from_local import LOCAL_TENSORS

_nanoseconds = time.perf_counter_ns


class Timer:
    """The sum of the time in all functions that were made by `timed`, in nanoseconds."""

    def __init__(self) -> None:
        self.spent = 0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, and its time is added to the sum."""

        def call(*args: Any) -> Any:
            start = _nanoseconds()
            try:
                return function(*args)
            finally:
                self.spent += _nanoseconds() - start

        return call


def _frame_behind_timer(depth: int) -> FrameType:
    return sys._getframe(depth + 2)  # this function, and `call`


def _detour(depth: int) -> FrameType:
    return _frame_behind_timer(depth + 1)


@contextmanager
def timing_hooks(detour: bool = False) -> Iterator[Timer]:
    """Time the hooks of a watch that is on, with the look-up of ops which is behind them; without one, that alone."""
    timer, frame = Timer(), op_events._frame
    source_lines._library_files.add(__file__)
    with ExitStack() as stack:
        op_events._frame = _detour if detour else _frame_behind_timer
        stack.callback(setattr, op_events, "_frame", frame)
        stack.callback(LOCAL_TENSORS._set, LOCAL_TENSORS.present)
        LOCAL_TENSORS._set(tuple(map(timer.timed, LOCAL_TENSORS.present)))
        for op in functional_collectives():
            if hasattr(op._op, "before"):
                stack.callback(setattr, op._op, "before", op._op.before)
                op._op.before = timer.timed(op._op.before)

        def lookup(look_up: Lookup) -> Lookup:
            return timer.timed(look_up)

        stack.enter_context(LOOKUPS.observing(lookup))
        yield timer
