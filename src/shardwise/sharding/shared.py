"""A context that threads share: what exists once in the process is changed while any of them needs it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager


class SharedContext:
    """A context manager that is entered for the first user and left after the last, in whichever order they leave.

    >>> REPLACED = SharedContext(replaced_method)
    >>> with REPLACED:          # in two threads at once: the method is replaced once, and put back once
    ...     model(x)
    """

    def __init__(self, make: Callable[[], AbstractContextManager[object]]) -> None:
        self._make = make
        self._users = 0
        self._lock = threading.Lock()
        self._entered: AbstractContextManager[object]

    def __enter__(self) -> None:
        with self._lock:
            if not self._users:
                self._entered = self._make()
                self._entered.__enter__()
            self._users += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._entered.__exit__(None, None, None)
                del self._entered
