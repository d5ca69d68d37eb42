"""`erase`: record a step once, and replay its local ops from then on."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Generic, ParamSpec, Self, TypeVar, overload

import torch.distributed as dist

from ..errors import EraseError, InputError
from ..sharding.runtime import WorldCache, all_runtimes, runtime_of_world
from .guards import Signature, flatten, signature_of
from .passes import PASSES
from .record import record
from .replay import Replay

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class Recordings:
    """The recordings of one step in one world."""

    def __init__(self) -> None:
        self.replays: dict[Signature, list[Replay]] = {}
        self.escapes: dict[Signature, int] = {}
        """How many calls made a tensor that something outside the step has kept."""
        self.last: Replay | None = None


_RECORDINGS: WorldCache[int, Recordings] = WorldCache("recordings of erased steps", 256, lambda serial, recordings: 1)
"""The recordings of each step, by its serial number. Like all caches it is cleared when rules or the cost model change.
"""
_MOST_SIGNATURES = 16
_MOST_VARIANTS = 4
_MOST_ATTEMPTS = 3
_serial = itertools.count()


class Erased(Generic[Parameters, Result]):
    """A step that is recorded at its first call, and replayed from then on. `erase` makes it.

    >>> step = erase(lambda x: (x * 2).sum())
    >>> value = step(torch.ones(4))                          # runs as written, and is recorded
    >>> print(step.code)                                     # the local program
    """

    def __init__(self, fn: Callable[Parameters, Result], backend: str, passes: tuple[str, ...]) -> None:
        functools.update_wrapper(self, fn)
        self._fn, self._backend, self._passes = fn, backend, passes
        self._serial = next(_serial)
        self.recordings = 0
        """How often the step was recorded."""
        weakref.finalize(self, _forget, self._serial).atexit = False

    def __call__(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        leaves, structure = flatten(args, kwargs)
        signature = signature_of(leaves, structure)
        recordings = self._recordings()
        for replay in recordings.replays.get(signature, ()):
            if replay.guards.hold():
                recordings.last = replay
                return replay(leaves)
        return self._record(args, kwargs, leaves, signature)

    def _recordings(self) -> Recordings:
        cache = _RECORDINGS.of(runtime_of_world())
        found = cache.get(self._serial)
        if found is None:
            found = cache[self._serial] = Recordings()
        return found

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type | None = None) -> Erased[..., Result]: ...
    def __get__(self, instance: object, owner: type | None = None) -> Self | Erased[..., Result]:
        """Return the erased step that belongs to one object, for a decorated method."""
        if instance is None:
            return self
        bound = Erased(self._fn.__get__(instance, owner), self._backend, self._passes)
        instance.__dict__[self._fn.__name__] = bound
        return bound

    @property
    def code(self) -> str:
        """The local program that ran last, as Python code."""
        return self._replay().text

    def explain(self) -> str:
        """Return a summary of the last run: ops, collectives by axis with bytes, changes by passes, guards."""
        return self._replay().explain()

    def _replay(self) -> Replay:
        last = self._recordings().last if dist.is_initialized() else None
        if last is None:
            raise EraseError(f"the erased step {self._fn!r} is not recorded yet in this world", "call it first")
        return last

    def _record(
        self, args: tuple[object, ...], kwargs: dict[str, object], leaves: list[object], signature: Signature
    ) -> Result:
        recorded, result = record(self._fn, args, kwargs, leaves)
        self.recordings += 1
        if recorded.escaped:
            return self._kept_outside(recorded.escaped, signature, result)
        replay = Replay(recorded, self._backend, self._passes)
        recordings = self._recordings()
        recordings.last, table = replay, recordings.replays
        known = table.pop(signature, [])
        while len(table) >= _MOST_SIGNATURES:
            del table[next(iter(table))]
        table[signature] = [replay, *known][:_MOST_VARIANTS]
        return result

    def _kept_outside(self, lines: list[str], signature: Signature, result: Result) -> Result:
        """Return the result of a call whose tensors are kept outside; after several such calls, raise an error.

        The first calls may do so to fill caches.
        """
        escapes = self._recordings().escapes
        count = escapes.pop(signature, 0) + 1
        while len(escapes) >= _MOST_SIGNATURES:
            del escapes[next(iter(escapes))]
        escapes[signature] = count
        if count >= _MOST_ATTEMPTS:
            raise EraseError(
                f"{lines[0]}: something outside the step keeps a tensor that this line makes, in each of {count} "
                "calls; a replay would not put it there",
                "return the tensor, or copy it into one that exists: kept.copy_(value)",
            )
        return result


@overload
def erase(
    fn: None = None, *, backend: str = "eager", passes: Iterable[str] = ...
) -> Callable[[Callable[Parameters, Result]], Erased[Parameters, Result]]: ...
@overload
def erase(
    fn: Callable[Parameters, Result], *, backend: str = "eager", passes: Iterable[str] = ...
) -> Erased[Parameters, Result]: ...
def erase(
    fn: Callable[Parameters, Result] | None = None, *, backend: str = "eager", passes: Iterable[str] = tuple(PASSES)
) -> Erased[Parameters, Result] | Callable[[Callable[Parameters, Result]], Erased[Parameters, Result]]:
    """Record a step at its first call, and replay its local ops and collectives from then on.

    The step is any function of distributed tensors: forward, backward, clipping, an optimizer's step, or a part of it.
    It is recorded again when specs, shapes, modes, modules or Python values that it uses have changed.

    >>> step = shardwise.erase(train_step)       # or as a decorator
    >>> loss = step(batch)                       # runs as written, and is recorded
    >>> loss = step(batch)                       # runs the recording
    >>> print(step.code)                         # the local program
    """
    chosen = tuple(passes)
    unknown = [name for name in chosen if name not in PASSES]
    if unknown:
        raise InputError(f"erase has no passes named {unknown}", f"choose from {', '.join(PASSES)}")
    if backend not in ("eager", "cudagraph", "inductor"):
        raise InputError(f"erase has no backend {backend!r}", "use 'eager', 'cudagraph' or 'inductor'")
    if fn is None:
        return lambda fn: erase(fn, backend=backend, passes=chosen)
    if not callable(fn):
        raise InputError(f"erase got a {type(fn).__name__}, which is not callable", "pass a function or a module")
    return Erased(fn, backend, chosen)


def _forget(serial: int) -> None:
    """Drop the recordings of a deleted step."""
    for runtime in all_runtimes():
        recordings = _RECORDINGS.of(runtime).get(serial)
        if recordings is not None:
            recordings.replays.clear()
            recordings.last = None
