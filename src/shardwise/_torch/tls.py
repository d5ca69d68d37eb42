"""Values of a thread, which the threads inherit in which autograd runs its backward passes.

>>> strict = ThreadValue("strict", False)
>>> strict.set(True)          # seen by this thread, and by its backward passes on any device; by no other thread
>>> strict.get()
True
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch

T = TypeVar("T")

_stash = torch._C._stash_obj_in_tls
_get = torch._C._get_obj_in_tls
_has = torch._C._is_key_in_tls


def _stash_takes_the_callers_reference() -> bool:
    """Return whether `_stash` takes over the caller's reference instead of adding one, as in PyTorch 2.11."""
    probe = object()
    count = sys.getrefcount(probe)
    _stash("shardwise.probe", probe)
    taken = sys.getrefcount(probe) == count
    if taken:
        _add_reference(probe)
    return taken


def _add_reference(value: object) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


_TAKES_REFERENCE = _stash_takes_the_callers_reference()


class ThreadValue(Generic[T]):
    """A value of the current thread, which its backward passes inherit.

    It relies on PyTorch's thread-local table of Python objects: a backward pass copies the table of the thread that
    starts it into each thread it runs in. The copy shares the objects, so a value must not be changed in place.
    """

    def __init__(self, name: str, default: T) -> None:
        self._key, self._default = f"shardwise.{name}", default

    def get(self) -> T:
        """Return the value of this thread, or the default if it has none."""
        found: T = _get(self._key) if _has(self._key) else self._default
        return found

    def set(self, value: T) -> None:
        """Set the value for this thread, and for backward passes that it starts from now on."""
        if _TAKES_REFERENCE:
            _add_reference(value)
        _stash(self._key, value)

    @contextmanager
    def changed_to(self, value: T) -> Iterator[None]:
        """Give this thread, and backward passes that it starts, another value inside the block."""
        before = self.get()
        self.set(value)
        try:
            yield
        finally:
            self.set(before)
