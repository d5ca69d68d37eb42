"""The runtime: everything that lives exactly as long as one world.

A world is a default process group, real or simulated. Its runtime owns the information about its meshes, their process
groups, plans, and every other cache whose entries refer to a mesh. A module declares such a cache at module level, and
the runtime holds its entries:

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
        """Return the state of a declaration (`WorldState`) in this world, made on first use."""
        found = self._state.get(owner)
        if found is None:
            with making:
                found = self._state.setdefault(owner, make())
        return cast(T, found)

    def clear_caches(self) -> None:
        """Empty every cache, but no other state."""
        for state in self._state.values():
            if isinstance(state, Cache):
                state.clear()

    def end(self) -> None:
        """Drop everything. What the program still holds of an ended world must not keep all the rest of it alive."""
        self._state.clear()
        self.meshes.clear()
        self.adopted.clear()


class WorldState(Generic[T]):
    """Declares state of which each world has its own: `COUNTS = WorldState(dict)`, `COUNTS.of(runtime)`."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make

    def of(self, runtime: Runtime) -> T:
        """Return the state of one world."""
        return runtime.state(self, self._make)


class WorldCache(WorldState[Cache[K, V]]):
    """Declares a cache of which each world has its own, bounded in bytes."""

    def __init__(
        self, name: str, max_bytes: int, size_of: Callable[[K, V], int] = lambda key, value: ENTRY_BYTES
    ) -> None:
        super().__init__(lambda: Cache(max_bytes, size_of))
        self.name = name

    def entry(self, runtime: Runtime, key: K, make: Callable[[], V]) -> V:
        """Return the value of a key in one world, made on first use. It must not be None."""
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
    """Return the runtime of the world that was entered, or adopted a mesh, last. Does not call torch.distributed."""
    return _Active.runtime


def runtime_of_world() -> Runtime:
    """Return the runtime of the present default process group, and make it the active one."""
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
    """Call `listener` with the active runtime, now and whenever another becomes active."""
    _Active.listeners = (*_Active.listeners, listener)
    listener(_Active.runtime)


def end_world(*default_groups: dist.ProcessGroup | None) -> None:
    """Drop the runtimes of a simulated world at its end.

    The program may have destroyed its default group (None), and started another: pass the one that the world began
    with, and the present one.
    """
    ended = [_runtimes.pop(group) for group in default_groups if group is not None and group in _runtimes]
    if _Active.runtime not in all_runtimes():
        _activate(Runtime())
    for runtime in ended:
        runtime.end()
    forget_last_trace()


def _drop_ended_worlds() -> None:
    """Drop the runtimes of worlds that destroy_process_group() has ended: their meshes keep groups alive."""
    for world in [*_runtimes]:
        if not group_is_registered(world):
            _runtimes.pop(world).end()
            forget_last_trace()


def all_runtimes() -> list[Runtime]:
    """Return the runtimes of all worlds that have not ended."""
    with making:  # another thread may enter a runtime meanwhile
        return [*_runtimes.values()]


def clear_all_caches() -> None:
    """Empty the caches of every world, after a change of the cost model or of the rules of ops."""
    for runtime in {*all_runtimes(), _Active.runtime}:
        runtime.clear_caches()


def _activate(runtime: Runtime) -> None:
    _Active.runtime = runtime
    for listener in _Active.listeners:
        listener(runtime)
