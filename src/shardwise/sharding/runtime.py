"""The runtime: everything that lives exactly as long as one world.

A world is a default process group, real or simulated. Its runtime owns the information about its meshes, their process
groups, plans, and every other cache whose entries name a mesh. A module declares such a cache once, at module level,
and the runtime holds its entries:

>>> LINKS = WorldCache("links", max_bytes=1 << 20)
>>> LINKS.of(runtime)[key] = value

When the world ends, the runtime is dropped and all of it with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar, cast
from weakref import WeakKeyDictionary

import torch.distributed as dist

from .._torch.collectives import group_is_registered
from .._torch.dynamo import forget_last_trace
from .cache import ENTRY_BYTES, Cache
from .once import making

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from .mesh import MeshInfo

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")


class Runtime:
    """The meshes, caches and other state of one world."""

    __slots__ = ("__weakref__", "_state", "adopted", "meshes")

    def __init__(self) -> None:
        self.meshes: dict[DeviceMesh, MeshInfo] = {}
        self.adopted: dict[int, tuple[DeviceMesh, MeshInfo]] = {}
        """Meshes that are ready to communicate, by id: hashing a mesh costs more than an op should."""
        self._state: dict[object, object] = {}

    def state(self, owner: object, make: Callable[[], T]) -> T:
        """The state of a declaration in this world, made on first use."""
        found = self._state.get(owner)
        if found is None:
            with making:
                found = self._state.setdefault(owner, make())
        return cast(T, found)

    def clear_caches(self) -> None:
        """Empty every cache. Other state stays."""
        for state in self._state.values():
            if isinstance(state, Cache):
                state.clear()


class WorldState(Generic[T]):
    """Declares state that each world has its own copy of: `COUNTS = WorldState(dict)`, `COUNTS.of(runtime)`."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make

    def of(self, runtime: Runtime) -> T:
        """The state of one world."""
        return runtime.state(self, self._make)


class WorldCache(WorldState[Cache[K, V]]):
    """Declares a cache that each world has its own copy of, bounded in bytes."""

    def __init__(
        self, name: str, max_bytes: int, size_of: Callable[[K, V], int] = lambda key, value: ENTRY_BYTES
    ) -> None:
        super().__init__(lambda: Cache(max_bytes, size_of))
        self.name = name

    def entry(self, runtime: Runtime, key: K, make: Callable[[], V]) -> V:
        """The value of a key in one world, made on first use. It must not be None."""
        cache = self.of(runtime)
        found = cache.get(key)
        if found is None:
            found = cache[key] = make()
        return found

    def __repr__(self) -> str:
        return f"WorldCache({self.name!r})"


# ---- which world is running ---------------------------------------------------------------------------------------

_runtimes: WeakKeyDictionary[dist.ProcessGroup, Runtime] = WeakKeyDictionary()


class _Active:
    """The runtime whose tables are looked up first, and the functions to call when another becomes active."""

    runtime: Runtime = Runtime()
    listeners: tuple[Callable[[Runtime], None], ...] = ()


def active_runtime() -> Runtime:
    """The runtime of the world that was entered or adopted a mesh last, without asking torch.distributed."""
    return _Active.runtime


def runtime_of_world() -> Runtime:
    """The runtime of the present default process group; it becomes the active one."""
    world = dist.group.WORLD
    assert world is not None, "callers have checked that torch.distributed is initialised"
    runtime = _runtimes.get(world)
    if runtime is None:
        with making:
            _drop_ended_worlds()
            runtime = _runtimes.setdefault(world, Runtime())
    if runtime is not _Active.runtime:
        _activate(runtime)
    return runtime


def on_activate(listener: Callable[[Runtime], None]) -> None:
    """Call this with the active runtime, now and whenever another becomes active."""
    _Active.listeners = (*_Active.listeners, listener)
    listener(_Active.runtime)


def end_world(default_group: dist.ProcessGroup | None) -> None:
    """Drop the runtime of a simulated world at its end. None: the user destroyed its default group before."""
    ended = None if default_group is None else _runtimes.pop(default_group, None)
    if ended is _Active.runtime or default_group is None:
        _activate(Runtime())
    forget_last_trace()


def _drop_ended_worlds() -> None:
    """Drop the runtimes of worlds that destroy_process_group() has ended: their meshes keep their groups alive."""
    for world in [*_runtimes]:
        if not group_is_registered(world):
            del _runtimes[world]
            forget_last_trace()


def all_runtimes() -> list[Runtime]:
    """The runtimes of all worlds that have not ended."""
    return [*_runtimes.values()]


def clear_all_caches() -> None:
    """Empty the caches of every world: the cost model, or the rules of ops, have changed."""
    for runtime in {*all_runtimes(), _Active.runtime}:
        runtime.clear_caches()


def _activate(runtime: Runtime) -> None:
    _Active.runtime = runtime
    for listener in _Active.listeners:
        listener(runtime)
