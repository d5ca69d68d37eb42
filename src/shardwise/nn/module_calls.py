"""Functions around the calls of modules, for debug tools: in the thread that asks, and in its backward passes.

>>> def count(call, module, *args, **kwargs):
...     counts[type(module).__name__] += 1
...     return call(module, *args, **kwargs)
>>> with around_module_calls(count):
...     model(x)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from torch import nn

from .._torch.tls import ThreadValue
from ..sharding.shared import SharedContext

Wrapper = Callable[..., object]
"""A function of the call, the module and its arguments, which returns the result of the call."""

_wrappers: ThreadValue[tuple[Wrapper, ...]] = ThreadValue("module_calls", ())
"""The wrappers of this thread, the innermost first."""


@contextmanager
def around_module_calls(wrapper: Wrapper) -> Iterator[None]:
    """Run `wrapper` around all calls of modules in this thread and in its backward passes, inside the block.

    Global module hooks would leave out the module's own hooks. Other threads call modules meanwhile, undisturbed.
    """
    with _REPLACED, _wrappers.changed_to((*_wrappers.get(), wrapper)):
        yield


@contextmanager
def _replaced() -> Iterator[None]:
    """Make `nn.Module.__call__`, which all threads share, run the wrappers of its thread inside the block."""
    original: Callable[..., object] = nn.Module.__call__

    def called(module: nn.Module, *args: object, **kwargs: object) -> object:
        call = original
        for wrapper in _wrappers.get():
            call = partial(wrapper, call)
        return call(module, *args, **kwargs)

    nn.Module.__call__ = called  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]


_REPLACED = SharedContext(_replaced)
