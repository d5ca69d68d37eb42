"""Whether local shards still hold the data they had.

Writes are counted by version counters, except those of a kernel that has the address of the memory. Such a kernel can
only write a shard that was handed to the user. Before a watched shard is handed out, its data is copied, and later
compared. Whether data is reused then depends on the data alone, not on which ranks looked at their shards: a program
that prints `x.to_local()` on rank 0 must not make rank 0 communicate alone.

The caches of a world have a watch each. Exposing memory looks at these few watches, so that watching a shard, which
happens more often, leaves nothing behind on its memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..comm.packing import as_bytes
from ..sharding.recording import is_recording
from ..world import shards_of
from .memory_notes import MemoryNotes, is_exposed, notes_of


class Watch:
    """Some local tensors: their memory, their versions, and copies of the shards that are exposed to the user.

    It keeps the shards alive, so whoever has a watch drops it with the tensors that it is about. The entry of a cache
    that has the watch is stored before `start` looks which shards are exposed: another thread may expose one meanwhile.
    """

    __slots__ = ("_copies", "_memories", "_shards", "_states")

    def __init__(self, *locals_: Tensor) -> None:
        self._shards, self._memories, self._states = _shards_and_states(locals_)
        self._copies: dict[int, Tensor] | None = None

    def start(self) -> None:
        """Copy the shards that were exposed before."""
        self._copies = {i: shard.clone() for i, shard in enumerate(self._shards) if is_exposed(shard)}

    def unchanged(self, *locals_: Tensor) -> bool:
        """Return whether this is the memory that is watched, with the data that it had at the beginning."""
        copies = self._copies
        if copies is None or (copies and is_recording()):
            return False  # a recorded step must not depend on a comparison of present data
        shards, memories, states = _shards_and_states(locals_)
        if states != self._states or memories != self._memories:
            return False
        return all(_same_bits(copy, shards[i]) for i, copy in [*copies.items()])  # other threads may add copies

    def before_exposure(self, exposed: Tensor) -> None:
        """Copy the shards in the memory of this one, which is about to be exposed."""
        memory = exposed.untyped_storage()
        if memory not in self._memories:
            return
        if self._copies is None:  # `start` would come too late
            self._states.clear()
            return
        for i, shard in enumerate(self._shards):
            if self._memories[i] is memory and i not in self._copies:
                self._copies[i] = shard.clone()


class WatchingEntry(Protocol):
    """A cached tensor that is reused while it is unchanged."""

    @property
    def watch(self) -> Watch | None:
        """The watch of the tensors that must not change, if they need one."""


class WatchingCache:
    """The cached tensors of one world that are watched."""

    operand: WatchingEntry | None = None
    prepared_input: WatchingEntry | None = None


class _Active:
    """The cache of the active world."""

    cache = WatchingCache()


def use_cache(cache: WatchingCache) -> None:
    """Make this the cache whose watches learn, from now on, which memory is exposed."""
    _Active.cache = cache


def mark_exposed(local: Tensor) -> tuple[MemoryNotes, ...]:
    """Record that the user has a local shard: writes to it may go uncounted. Returns the notes on its memory."""
    if type(local) is Tensor:
        notes = notes_of(local)
        if not notes.exposed:
            _expose(local, notes)
        return (notes,)
    shards = shards_of(local)
    memory = tuple(map(notes_of, shards))
    for shard, notes in zip(shards, memory, strict=True):
        if not notes.exposed:
            _expose(shard, notes)
    return memory


def _expose(shard: Tensor, notes: MemoryNotes) -> None:
    notes.exposed = True
    cache = _Active.cache
    for entry in (cache.operand, cache.prepared_input):
        if entry is not None and entry.watch is not None:
            entry.watch.before_exposure(shard)


def _shards_and_states(locals_: Sequence[Tensor]) -> tuple[list[Tensor], list[torch.UntypedStorage], list[object]]:
    """Return the shards of local tensors, the memory of each, and the numbers that change when they are written.

    A tensor of several shards has a version of its own: the shards are written together, or one by one.
    """
    shards: list[Tensor] = []
    memories: list[torch.UntypedStorage] = []
    states: list[object] = []
    for local in locals_:
        if type(local) is not Tensor:
            states.append(local._version)
        for shard in shards_of(local):
            shards.append(shard)
            memories.append(shard.untyped_storage())
            states += (shard.storage_offset(), shard._version)
    return shards, memories, states


def _same_bits(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors hold the same bits, so that NaN equals NaN."""
    return torch.equal(as_bytes(first), as_bytes(second))
