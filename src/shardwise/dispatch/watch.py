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
from .memory_notes import notes_of, shards_of


class Watch:
    """Remembers which memory a local shard is and how often it was written, and its data once it is handed out."""

    __slots__ = ("__weakref__", "_copies", "_local", "_state")

    def __init__(self, local: Tensor) -> None:
        self._local = weakref.ref(local)
        self._state = _state(local)
        shards = shards_of(local)
        self._copies: list[Tensor | None] = [None] * len(shards)
        for i, shard in enumerate(shards):
            notes = notes_of(shard)
            # A tuple that is replaced: other threads may read it at any moment.
            notes.watches = (*[ref for ref in notes.watches if ref() is not None], weakref.ref(self))
            if notes.exposed and self._copies[i] is None:
                self._copies[i] = shard.clone()

    def unchanged(self, local: Tensor) -> bool:
        """Whether this is the same memory with the same data as when it was watched first."""
        if self._state != _state(local) or (is_recording() and any(copy is not None for copy in self._copies)):
            return False  # what the data is now says nothing about a replay
        return all(
            copy is None or _same_bits(copy, shard) for copy, shard in zip(self._copies, shards_of(local), strict=True)
        )

    def before_exposure(self, storage: torch.UntypedStorage) -> None:
        """Copy the data that is about to be handed out."""
        local = self._local()
        for i, shard in enumerate(shards_of(local)) if local is not None else ():
            if self._copies[i] is None and shard.untyped_storage() is storage:
                self._copies[i] = shard.clone()


def mark_exposed(local: Tensor) -> None:
    """Note that a local shard is in the user's hands, so that writes to it may go uncounted."""
    for shard in shards_of(local):
        notes = notes_of(shard)
        if not notes.exposed:
            notes.exposed = True
            for ref in notes.watches:
                if (watch := ref()) is not None:
                    watch.before_exposure(shard.untyped_storage())


def _state(local: Tensor) -> tuple[object, ...]:
    shards = [(id(s.untyped_storage()), s.storage_offset(), s._version) for s in shards_of(local)]
    return (local._version, *shards)


def _same_bits(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors hold the same bits, so that NaN equals NaN."""
    return torch.equal(as_bytes(first), as_bytes(second))
