"""Functions around the calls of modules, for debug tools: in the thread that asks, and in its backward passes.

>>> def count(call, module, *args, **kwargs):
...     counts[type(module).__name__] += 1
...     return call(module, *args, **kwargs)
>>> with around_module_calls(count):
...     model(x)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from .._torch.tls import ThreadValue

Wrapper = Callable[..., object]
"""A function of the call, the module and its arguments, which returns the result of the call."""

_wrappers: ThreadValue[tuple[Wrapper, ...]] = ThreadValue("module_calls", ())
"""The wrappers of this thread, the innermost first."""


@contextmanager
def around_module_calls(wrapper: Wrapper) -> Iterator[None]:
    """Run `wrapper` around all calls of modules in this thread and in its backward passes, inside the block.

    Global module hooks would leave out the module's own hooks. Other threads call modules meanwhile, undisturbed.
    """
    before = _wrappers.get()
    _Replaced.begin()
    _wrappers.set((*before, wrapper))
    try:
        yield
    finally:
        _wrappers.set(before)
        _Replaced.end()


class _Replaced:
    """The method `nn.Module.__call__`, which all threads share: it is replaced while any of them has a wrapper."""

    users = 0
    original: Callable[..., Any]
    lock = threading.Lock()

    @classmethod
    def begin(cls) -> None:
        """Replace the method, unless it is replaced already."""
        with cls.lock:
            cls.users += 1
            if cls.users == 1:
                cls.original = nn.Module.__call__
                nn.Module.__call__ = _calling(cls.original)  # type: ignore[method-assign]

    @classmethod
    def end(cls) -> None:
        """Put the method back, after its last user."""
        with cls.lock:
            cls.users -= 1
            if not cls.users:
                nn.Module.__call__ = cls.original  # type: ignore[method-assign]


def _calling(original: Callable[..., Any]) -> Callable[..., Any]:
    def called(module: nn.Module, *args: object, **kwargs: object) -> object:
        call = original
        for wrapper in _wrappers.get():
            call = partial(wrapper, call)
        return call(module, *args, **kwargs)

    return called
