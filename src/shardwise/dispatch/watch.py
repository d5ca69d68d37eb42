"""Whether a local shard still holds the data it had.

Writes are counted by version counters, except those of a kernel that has the address of the memory. Such a kernel can
only write a shard that was handed to the user. Before a watched shard is handed out, its data is copied, and later
compared. Whether data is reused then depends on the data alone, not on which ranks looked at their shards: a program
that prints `x.to_local()` on rank 0 must not make rank 0 communicate alone.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from ..comm.packing import as_bytes
from ..sharding.recording import is_recording
from .memory_notes import MemoryNotes, notes_of, shards_of


class Watch:
    """Records the memory and version of a local shard, and a copy of its data once it is exposed to the user."""

    __slots__ = ("__weakref__", "_copies", "_local", "_state")

    def __init__(self, local: Tensor) -> None:
        self._local = weakref.ref(local)
        self._state = _state(local)
        self._copies: list[Tensor | None] = []
        ref = weakref.ref(self)
        for shard in shards_of(local):
            notes = notes_of(shard)
            before = notes.watches
            notes.watches = (*[each for each in before if each() is not None], ref) if before else (ref,)
            self._copies.append(shard.clone() if notes.exposed else None)

    def unchanged(self, local: Tensor) -> bool:
        """Whether this is the memory that is watched, with the data that it had at the beginning."""
        if self._state != _state(local) or (is_recording() and any(copy is not None for copy in self._copies)):
            return False  # a recorded step must not depend on a comparison of present data
        return all(
            copy is None or _same_bits(copy, shard) for copy, shard in zip(self._copies, shards_of(local), strict=True)
        )

    def before_exposure(self, storage: torch.UntypedStorage) -> None:
        """Copy the shard in this storage, which is about to be exposed."""
        local = self._local()
        for i, shard in enumerate(shards_of(local)) if local is not None else ():
            if self._copies[i] is None and shard.untyped_storage() is storage:
                self._copies[i] = shard.clone()


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
    for ref in notes.watches:
        if (watch := ref()) is not None:
            watch.before_exposure(shard.untyped_storage())


def _state(local: Tensor) -> tuple[object, ...]:
    """The memory of a shard and its version. Notes stand for the memory: the id of a storage may be used again."""
    if type(local) is Tensor:
        return (notes_of(local), local.storage_offset(), local._version)
    shards = ((notes_of(s), s.storage_offset(), s._version) for s in shards_of(local))
    return (local._version, *shards)


def _same_bits(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors hold the same bits, so that NaN equals NaN."""
    return torch.equal(as_bytes(first), as_bytes(second))
