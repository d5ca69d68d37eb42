"""For `debug.watch`: a store with its own connection, hooks on calls of collectives, and groups that can be aborted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import Store

from .ops import OpOverload, OpOverloadPacket

__all__ = ["abort_group", "all_groups", "functional_collectives", "own_store", "store_port", "wrap_op"]

_c10d: Any = distributed_c10d

Before = Callable[[tuple[object, ...], dict[str, object]], None]
"""A function that gets the arguments of a call before it is made."""


def own_store() -> Store:
    """Return the store of the default group, with a connection of its own if the store uses connections.

    A thread that waits for a key blocks all others that use its connection. Relies on `_get_default_store`.
    """
    return _c10d._get_default_store().clone()


def store_port() -> int | None:
    """Return the port of the default store's server; None if it has no server. Relies on `underlying_store`."""
    store = _c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "port", None)


def all_groups() -> list[dist.ProcessGroup]:
    """Return the process groups of this rank. Relies on the table `_world.pg_map`."""
    return [*_c10d._world.pg_map]


def abort_group(group: dist.ProcessGroup) -> None:
    """End the collectives that a group is in. nccl ends them; gloo returns from this, and they go on waiting."""
    group.abort()


def functional_collectives() -> list[OpOverload | OpOverloadPacket]:
    """Return the functional collectives, as packets and overloads: programs call either.

    Relies on `_c10d_functional`.
    """
    found = []
    for name in (
        *("all_reduce", "all_reduce_", "all_reduce_coalesced", "all_reduce_coalesced_"),
        *("all_gather_into_tensor", "all_gather_into_tensor_coalesced", "all_gather_into_tensor_out"),
        *("reduce_scatter_tensor", "reduce_scatter_tensor_coalesced", "all_to_all_single", "broadcast", "broadcast_"),
    ):
        packet = getattr(torch.ops._c10d_functional, name, None)
        if packet is not None:
            found += [packet, packet.default]
    return found


_modes_active: Callable[[], int] = torch._C._len_torch_dispatch_stack
_passing: set[int] = set()
"""The threads that are inside a call of a wrapped op under dispatch modes, which call the op again."""


class _Wrapped:
    """Replaces the C++ function of an op, by which the op is hashed, so it has the same hash."""

    __slots__ = ("before", "original")

    def __init__(self, original: Callable[..., object], before: Before) -> None:
        self.original, self.before = original, before

    def __call__(self, *args: object, **kwargs: object) -> object:
        if _modes_active() or _passing:
            return self._through_modes(args, kwargs)
        self.before(args, kwargs)
        return self.original(*args, **kwargs)

    def _through_modes(self, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Call the op under dispatch modes, which call it again: that is one call of the program."""
        thread = threading.get_ident()
        if thread in _passing:
            return self.original(*args, **kwargs)
        self.before(args, kwargs)
        _passing.add(thread)
        try:
            return self.original(*args, **kwargs)
        finally:
            _passing.discard(thread)

    def __hash__(self) -> int:
        return hash(self.original)

    def __eq__(self, other: object) -> bool:
        return self is other


def wrap_op(op: OpOverload | OpOverloadPacket, before: Before) -> Callable[[], None]:
    """Call `before` before each call of an op from Python; return a function that undoes this.

    Relies on `_op` and `_len_torch_dispatch_stack`.
    """
    original = op._op
    op._op = _Wrapped(original, before)

    def undo() -> None:
        op._op = original

    return undo
