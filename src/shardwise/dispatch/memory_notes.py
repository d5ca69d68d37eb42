"""Notes on the memory of local shards, kept on the storage so that they live as long as it does."""

from __future__ import annotations

import weakref

from torch import Tensor

_NAME = "_notes_of_shardwise"


class MemoryNotes:
    """How the memory of a shard is used outside the distributed tensor that holds it.

    Most memory is never noted, or only marked as exposed. So everything has a default on the class, and making notes
    costs next to nothing.
    """

    exposed: bool = False
    """Whether the user may hold a tensor in this memory, so that writes to it may go uncounted."""
    handed_out: list[weakref.ref[Tensor]] | None = None
    """Tensors in this memory that `to_local` returned; their versions count writes to the distributed tensor.
    References to tensors that are gone are dropped now and then (`writes.count_writes_through`)."""
    writes: int = 0
    """How many ops on distributed tensors wrote this memory while writes were counted (`writes.watch`)."""


def notes_of(shard: Tensor) -> MemoryNotes:
    """Return the notes on the memory of one shard."""
    attributes = shard.untyped_storage().__dict__
    found: MemoryNotes | None = attributes.get(_NAME)
    return attributes.setdefault(_NAME, MemoryNotes()) if found is None else found


def is_exposed(shard: Tensor) -> bool:
    """Return whether the user may hold a tensor in the memory of one shard. Makes no notes."""
    notes: MemoryNotes | None = getattr(shard.untyped_storage(), _NAME, None)
    return notes is not None and notes.exposed
