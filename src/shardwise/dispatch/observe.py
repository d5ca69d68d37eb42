"""Observers of ops on distributed tensors: profilers and explanations.

While somebody observes, `__torch_dispatch__` of the class is another function; without observers ops cost nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from .._torch.ops import OpOverload
from ..sharding.base import DTensorBase
from .arguments import Args, Kwargs

OpObserver = Callable[[OpOverload, Args, Kwargs], AbstractContextManager[object]]
"""From a call to a context in which it runs."""

_observers: list[OpObserver] = []
_unobserved: list[Any] = []
"""The `__torch_dispatch__` that was swapped out, while somebody observes."""


@contextmanager
def observing_ops(observer: OpObserver) -> Iterator[None]:
    """Inside, every op on distributed tensors runs in the context that the observer returns for it."""
    _observers.append(observer)
    kind: Any = DTensorBase.concrete
    if not _unobserved:
        _unobserved.append(kind.__torch_dispatch__)
        kind.__torch_dispatch__ = staticmethod(_dispatch)
    try:
        yield
    finally:
        _observers.remove(observer)
        if not _observers:
            kind.__torch_dispatch__ = staticmethod(_unobserved.pop())


def _dispatch(func: OpOverload, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> object:
    with ExitStack() as stack:
        for observer in _observers:
            stack.enter_context(observer(func, args, kwargs or {}))
        return _unobserved[0](func, types, args, kwargs)
