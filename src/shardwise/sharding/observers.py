"""Observers: hooks for profilers and debug tools.

Each kind of event has one `Observers`, declared where the event happens:

| event | in | an observer gets |
|---|---|---|
| `OPS` | `dispatch/observe.py` | op, arguments and keyword arguments of a call on distributed tensors |
| `LOOKUPS` | `dispatch/observe.py` | the function that looks up the key of such a call; returns another |
| `REDISTRIBUTIONS` | `comm/redistribute.py` | source spec, target spec and local tensor, if data moves |
| `DRAWS` | `random/draw.py` | mesh and generator, before random numbers are drawn |
| `LOCAL_TENSORS` | `tensor/from_local.py` | the spec of a local tensor that becomes a distributed one |

An observer is called before the event, and may return a context manager in which the event runs. The code of an event
is swapped when observers come and go (`on_change`), so that it costs nothing while there are none.

>>> DRAWS: Observers[[int], None] = Observers()
>>> with DRAWS.observing(lambda number: print("draw", number)):
...     DRAWS.notify(3)
draw 3
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Generic, ParamSpec, TypeVar

Event = ParamSpec("Event")
Returned = TypeVar("Returned")

Around = AbstractContextManager[object]
"""The context managers that observers of ops and redistributions return."""


class Observers(Generic[Event, Returned]):
    """The observers of one kind of event."""

    def __init__(self) -> None:
        self.present: tuple[Callable[Event, Returned], ...] = ()
        """In the order in which they were added."""
        self._updates: list[Callable[[], object]] = []
        self._lock = threading.RLock()

    def on_change(self, update: Callable[[], object]) -> None:
        """Call this function whenever an observer is added or removed: it swaps the code of the event."""
        self._updates.append(update)

    def add(self, observer: Callable[Event, Returned]) -> Callable[[], None]:
        """Add an observer; returns a function that removes it, and does nothing when called again."""
        once = [observer]
        with self._lock:
            self._set((*self.present, observer))

        def remove() -> None:
            with self._lock:
                if once:
                    left = [*self.present]
                    del left[next(i for i, other in enumerate(left) if other is once[0])]
                    once.clear()
                    self._set(tuple(left))

        return remove

    @contextmanager
    def observing(self, observer: Callable[Event, Returned]) -> Iterator[None]:
        """Add an observer for the duration of a block."""
        remove = self.add(observer)
        try:
            yield
        finally:
            remove()

    def notify(self, *event: Event.args, **named: Event.kwargs) -> None:
        """Call all observers."""
        for observer in self.present:
            observer(*event, **named)

    def around(self, *event: Event.args, **named: Event.kwargs) -> ExitStack:
        """Call all observers, and enter the contexts that they return. The result is a context that leaves them."""
        with ExitStack() as stack:
            for observer in self.present:
                context: Any = observer(*event, **named)
                if context is not None:
                    stack.enter_context(context)
            return stack.pop_all()

    def _set(self, present: tuple[Callable[Event, Returned], ...]) -> None:
        self.present = present
        for update in self._updates:
            update()
