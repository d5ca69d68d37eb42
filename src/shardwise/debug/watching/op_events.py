"""Events of ops on distributed tensors, and of `from_local`.

The look-up of the hot path is replaced by one that appends the event of the call to a stream. An event is a number that
is cached for each key and each position in the caller's code, so that a call costs two look-ups and a `sys._getframe`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch

from ..._torch.ops import OpOverload, schema_of
from ...dispatch.hot_path import Ready
from ...dispatch.key import Key
from ...dispatch.observe import Lookup, calling_frame, passes_calls_on
from ...ops.trivial import computes_nothing
from ...sharding import observers
from ...sharding.cache import ENTRY_BYTES
from ...sharding.mesh import MeshInfo
from ...sharding.runtime import WorldCache, active_runtime, all_runtimes
from ...sharding.spec import DTensorSpec
from ...tensor import from_local
from .journal import Failing, Journal, digest

_frame = sys._getframe
_MOST_PLACES = 256
_MOST_CALLS = 1 << 16

_MAKING = (os.path.dirname(from_local.__file__) + os.sep, observers.__file__)
"""Files whose frames lie between the caller of `from_local` or a factory and the event."""

_Places = dict[object, tuple[CodeType, int]]
"""The event of a call, by its offset in the caller's code, and by offset and identity of that code."""
_Call = tuple[Ready | None, Callable[[int], None] | None, _Places | None, Any]
"""The hot-path entry of a call, `append` of its stream (None if it is not an event), places, and (digest, text).

If a library made the first of these calls, places is None, and the last item is the event itself.
"""

_Made = tuple[Callable[[int], None] | None, int | None, int, str]
"""For a spec: `append` of its stream (None if it is not an event), its event if a library makes it, digest and text."""

_CALLS: WorldCache[Key, _Call] = WorldCache("watched calls", 32 << 20, lambda key, call: 4 * ENTRY_BYTES)
_MADE: WorldCache[DTensorSpec, _Made] = WorldCache("watched specs", 8 << 20, lambda spec, made: 2 * ENTRY_BYTES)


def forget_calls() -> None:
    """Clear the cached calls and specs of all worlds, which belong to another journal."""
    for runtime in {*all_runtimes(), active_runtime()}:
        _CALLS.of(runtime).clear()
        _MADE.of(runtime).clear()


class OpEvents:
    """Writes the events into a journal, unless something has failed."""

    def __init__(self, journal: Journal, failing: Failing) -> None:
        self._journal, self._failing = journal, failing
        self._in_library: dict[int, bool] = {}

    def watched_lookup(self, look_up: Lookup) -> Lookup:
        """Return the look-up of the hot path, extended to append an event for each call."""
        cache = _CALLS.of(active_runtime())
        calls, first_call, other_place = cache.recent, self._first_call, self._other_place

        def watched(key: Key) -> Ready | None:
            try:
                ready, append, places, event = calls[key]
            except KeyError:
                ready, append, places, event = cache[key] = first_call(key, _frame(1))
            if append is not None:
                if places is not None:
                    try:
                        caller = _frame(2)
                        code, at_place = places[caller.f_lasti]
                        event = at_place if code is caller.f_code else other_place(places, event, caller)
                    except KeyError:
                        event = other_place(places, event, caller)
                    except ValueError:  # a thread of the autograd engine has no caller in Python
                        event = event[0] + 1
                append(event)
            if ready is None:
                ready = look_up(key)
                if ready is not None:
                    call = calls.get(key)
                    if call is not None:
                        cache[key] = ready, *call[1:]
            return ready

        return watched

    def _first_call(self, key: Key, frame: FrameType) -> _Call:
        """Return the entry of a call whose key is new; `frame` is that of the hot path."""
        func, spec = frame.f_locals["func"], _first_spec(key)
        if spec is None or not is_compared(spec.mesh_info) or _is_free(func):
            return None, None, None, None
        what = f"{func}({', '.join(_text(part) for part in key[1:])}) on {spec.mesh_info!r}"
        number, append = digest(f"{what} {_strides(key)}"), self._journal.stream(spec.mesh_info.ranks).append
        if self._is_first_in_library(number, what, frame.f_back and calling_frame(frame.f_back)):
            return None, append, None, number + 1
        return None, append, {}, (number, what)

    def _is_first_in_library(self, number: int, what: str, caller: FrameType | None) -> bool:
        """Return whether a library made the first of these calls. Not in the caches, which one rank may clear alone."""
        found = self._in_library.get(number)
        if found is None:
            if len(self._in_library) >= _MOST_CALLS:
                self._in_library.clear()
            event = number + 1 if caller is None else self._journal.place_of_call(number, what, caller)
            found = self._in_library[number] = event == number + 1
        return found

    def _other_place(self, places: _Places, what: tuple[int, str], caller: FrameType) -> int:
        """Return the event of a call from a new position, or from one whose offset another function used last."""
        frame = calling_frame(caller)
        code, at = frame.f_code, frame.f_lasti
        found = places.get((at, id(code)))
        if found is None:
            if len(places) >= _MOST_PLACES:
                places.clear()
            found = places[at, id(code)] = code, self._journal.place_of_call(*what, frame)
        if not passes_calls_on(frame):
            places[at] = found
        return found[1]

    def local_tensor(self, spec: DTensorSpec) -> None:
        """Record that a DTensor is made from local tensors: its spec must be the same on all ranks."""
        if self._failing.failure is not None:
            self._failing.check()
        cache = _MADE.of(spec.mesh_info.runtime)
        made = cache.get(spec)
        if made is None:
            made = cache[spec] = self._first_tensor(spec, _maker(_frame(1)))
        append, event, number, what = made
        if append is not None:
            append(self._journal.place(number, what, _frame(1)) if event is None else event)

    def _first_tensor(self, spec: DTensorSpec, caller: FrameType) -> _Made:
        """Return the entry of a new spec; with its event if a library, such as a parallel style, makes the tensor."""
        if not is_compared(spec.mesh_info):
            return None, None, 0, ""
        what = f"make {spec!r} from local tensors on {spec.mesh_info!r}"
        number, append = digest(what), self._journal.stream(spec.mesh_info.ranks).append
        in_library = self._is_first_in_library(number, what, caller)
        return append, number + 1 if in_library else None, number, what


def _maker(frame: FrameType) -> FrameType:
    """Return the frame that makes a distributed tensor: the first outside of `from_local` and factories."""
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_MAKING):
        frame = frame.f_back
    return frame


def is_compared(mesh_info: MeshInfo) -> bool:
    """Return whether calls on a mesh are compared: this process and others are in it."""
    return not mesh_info.simulated and not mesh_info.outside and len(mesh_info.ranks) > 1


def _is_free(func: OpOverload) -> bool:
    """Return whether one rank may call an op alone, for a log.

    Such are views, and ops that return no tensor, such as `item()`.
    """
    return computes_nothing(func) or not any("Tensor" in str(result.type) for result in schema_of(func).returns)


def _first_spec(key: tuple[object, ...]) -> DTensorSpec | None:
    for part in key:
        if isinstance(part, DTensorSpec):
            return part
        if isinstance(part, tuple) and (found := _first_spec(part)) is not None:
            return found
    return None


def _text(part: object) -> str:
    """Return a part of the key of a call as text that is the same on all ranks."""
    if isinstance(part, tuple):
        if len(part) == 2 and part[0] is bool:
            return repr(part[1])
        return f"[{', '.join(map(_text, part))}]"
    if isinstance(part, type):
        return part.__name__
    if isinstance(part, (DTensorSpec, int, str, float, complex, type(None), torch.Size)):
        return repr(part)
    if isinstance(part, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return str(part)
    return type(part).__name__


def _strides(key: Key) -> str:
    return " ".join(str(tuple(part.stride)) for part in key if isinstance(part, DTensorSpec))
