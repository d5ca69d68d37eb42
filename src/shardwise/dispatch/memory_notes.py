"""Notes on the memory of local shards, kept on the storage so that they live as long as it does."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch import Tensor

from ..world import RankTensor

if TYPE_CHECKING:
    from .watch import Watch

_NAME = "_notes_of_shardwise"
_FEW = 8


class MemoryNotes:
    """How the memory of a shard is used outside the distributed tensor that holds it."""

    __slots__ = ("exposed", "handed_out", "watches", "writes")

    def __init__(self) -> None:
        self.exposed = False
        """Whether the user may hold a tensor in this memory, so that writes to it may go uncounted."""
        self.handed_out: list[weakref.ref[Tensor]] = []
        """Tensors in this memory that `to_local` returned; their versions count writes to the distributed tensor."""
        self.watches: tuple[weakref.ref[Watch], ...] = ()
        self.writes = 0
        """By ops on distributed tensors, counted while a view needs to know."""

    def hand_out(self, tensor: Tensor) -> None:
        """Record that the user gets this tensor."""
        self.handed_out.append(weakref.ref(tensor))
        count = len(self.handed_out)
        if count >= _FEW and not count & (count - 1):  # now and then, those that are gone are dropped
            self.handed_out = [ref for ref in self.handed_out if ref() is not None]


def notes_of(shard: Tensor) -> MemoryNotes:
    """Return the notes on the memory of one shard."""
    storage = shard.untyped_storage()
    try:
        return storage._notes_of_shardwise  # type: ignore[attr-defined]
    except AttributeError:
        return storage.__dict__.setdefault(_NAME, MemoryNotes())


def shards_of(local: Tensor) -> tuple[Tensor, ...]:
    """The shards in a local tensor: one, or one for each simulated rank."""
    if type(local) is Tensor:
        return (local,)
    return local.shards if isinstance(local, RankTensor) else (local,)
