"""PyTorch's tools that observe a program: the profiler, and `DebugMode`.

Both are notified of redistributions only while they are active. To avoid a check for each redistribution, the
functions that turn them on and off are wrapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch.autograd.profiler
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _debug_mode
from torch.utils._debug_mode import DebugMode as DebugMode
from torch.utils._debug_mode import get_active_debug_mode
from torch.utils._python_dispatch import TorchDispatchMode

P = ParamSpec("P")
T = TypeVar("T")

_OpCall: Callable[..., object] = _debug_mode._OpCall  # type: ignore[attr-defined]

record_function = torch.autograd.profiler.record_function
"""`with record_function(name):` is a context that the profiler shows under this name."""


_profiler: Any = torch.autograd.profiler
_NOT_SHOWN: AbstractContextManager[object] = nullcontext()


def shown_in_profile(name: str, *parts: object) -> AbstractContextManager[object]:
    """Return a context that a profiler, if one is active, shows as `name.format(*parts)`.

    For code that communicates, which is slower than the check. Relies on `_is_profiler_enabled`.
    """
    return record_function(name.format(*parts)) if _profiler._is_profiler_enabled else _NOT_SHOWN


def call_while_profiling(begin: Callable[[], None], end: Callable[[], None]) -> None:
    """Call `begin` when a profiler starts in this process, and `end` when it stops.

    Relies on all profilers calling `_run_on_profiler_start` and `_run_on_profiler_stop` by these names.
    """
    _profiler._run_on_profiler_start = _then(_profiler._run_on_profiler_start, begin)
    _profiler._run_on_profiler_stop = _then(_profiler._run_on_profiler_stop, end)


def call_while_debugging(begin: Callable[[DebugMode], None], end: Callable[[DebugMode], None]) -> None:
    """Call `begin` with a `DebugMode` when it is entered, and `end` when it is left."""
    mode: Any = DebugMode
    mode.__enter__ = _then(mode.__enter__, begin)
    mode.__exit__ = _then(mode.__exit__, end)


def shows_redistribution(
    mode: DebugMode, local: Tensor, source: object, target: object, what: str
) -> AbstractContextManager[object]:
    """Return a context in which a `DebugMode` shows a redistribution of a local tensor, with the ops inside."""
    return mode.record_redistribute_calls(local, source, target, what)


@contextmanager
def shows_op(mode: DebugMode, func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> Iterator[None]:
    """Return a context in which a `DebugMode` shows an op on distributed tensors, with the ops inside.

    A `DebugMode` is inactive during ops on classes that it does not know. If it is active, it shows the op itself.
    """
    if get_active_debug_mode() is not None:
        yield
        return
    mode._record_call(_OpCall(func, args, kwargs, mode.call_depth, stack=mode.record_stack_trace))
    TorchDispatchMode.__enter__(mode)
    try:
        yield
    finally:
        TorchDispatchMode.__exit__(mode, None, None, None)


def _then(function: Callable[P, T], also: Callable[..., None]) -> Callable[P, T]:
    @wraps(function)
    def both(*args: P.args, **kwargs: P.kwargs) -> T:
        result = function(*args, **kwargs)
        also(*args[:1])
        return result

    return both
