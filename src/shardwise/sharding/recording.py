"""Code that a recorder of ops records as one op, because it reads tensors or generators on the host.

A recording (see `erasing/`) holds the ops that ran. A number that Python code has read from a tensor, or drawn from a
generator, would be frozen in it. Code that uses such a number only internally runs through `recorded`: the recording
then calls this code in each replay.

>>> recorded(_raise_unless, condition, "weights are negative")    # checked again in each replay
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from .._torch.tls import ThreadValue

T = TypeVar("T")


class Recorder(Protocol):
    """Records the ops of this thread."""

    def call(self, fn: Callable[..., T], args: tuple[object, ...]) -> T:
        """Run a function of tensors and constants, and record it as one op."""


recorder: ThreadValue[Recorder | None] = ThreadValue("recorder", None)
"""The recorder of this thread and its backward passes, if its ops are being recorded."""


def recorded(fn: Callable[..., T], *args: object) -> T:
    """Return `fn(*args)`; if ops are being recorded, the call is recorded as one op."""
    active = recorder.get()
    return fn(*args) if active is None else active.call(fn, args)


def is_recording() -> bool:
    """Return whether the ops of this thread are being recorded."""
    return recorder.get() is not None
