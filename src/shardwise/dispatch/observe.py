"""Observers of ops on distributed tensors (see `sharding/observers.py`).

`OPS` is for tools that need the arguments, or a context around the call: profilers, `DebugMode`, `debug.explain`. While
it has observers, the class has another `__torch_dispatch__`. `LOOKUPS` is for tools that must cost less than a tenth of
an op, such as `debug.watch`: the hot path looks up the key of the call with the function that the observer returns.
Without observers, neither costs anything.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

from .._torch.callers import passes_ops_on
from .._torch.ops import OpOverload
from ..sharding.base import DTensorBase
from ..sharding.observers import Around, Observers
from .arguments import Args, Kwargs

if TYPE_CHECKING:
    from .hot_path import Ready

Lookup = Callable[[Any], "Ready | None"]
"""Looks up the hot-path entry of a call by its key; None if there is none."""

OPS: Observers[[OpOverload, Args, Kwargs], Around] = Observers()
LOOKUPS: Observers[[Lookup], Lookup] = Observers()


class _Unobserved:
    """The `__torch_dispatch__` of the class without observers. It stays here for threads that are inside of an op when
    the last observer goes."""

    dispatch: Callable[..., object]
    swapped = False


@OPS.on_change
def _swap() -> None:
    kind: Any = DTensorBase.concrete
    if OPS.present and not _Unobserved.swapped:
        _Unobserved.dispatch, _Unobserved.swapped = kind.__torch_dispatch__, True
        kind.__torch_dispatch__ = staticmethod(_dispatch)
    elif not OPS.present and _Unobserved.swapped:
        kind.__torch_dispatch__, _Unobserved.swapped = staticmethod(_Unobserved.dispatch), False


def _dispatch(func: OpOverload, types: object, args: Args = (), kwargs: Kwargs | None = None) -> object:
    unobserved = _Unobserved.dispatch
    with OPS.around(func, args, kwargs or {}):
        return unobserved(func, types, args, kwargs)


def observed(look_up: Lookup) -> Lookup:
    """Return the look-up that the hot path uses: this one, wrapped by the observers."""
    for observer in LOOKUPS.present:
        look_up = observer(look_up)
    return look_up


def calling_frame(frame: FrameType) -> FrameType:
    """Return the frame that called an op: this one, or the first one outside of modes and observers if it is inside.

    So a call has the same frame on a rank with a profiler as on one without.
    """
    found = frame
    outer: FrameType | None = frame
    while outer is not None:
        if passes_calls_on(outer) and outer.f_back is not None:
            found = outer.f_back
        outer = outer.f_back
    return found


def passes_calls_on(frame: FrameType) -> bool:
    """Return whether a frame only forwards a call of an op: the call of the overload itself, a mode, or `_dispatch`."""
    return frame.f_code is _dispatch.__code__ or passes_ops_on(frame.f_code)
