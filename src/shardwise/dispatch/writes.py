"""Counting writes to local shards, for views that must be recomputed after a write.

PyTorch counts the writes that a user makes to a local shard in a version counter: that of the shard, or, if the user
got it from `to_local`, that of the distributed tensor. It does not count the writes of ops on distributed tensors,
which run below autograd. These are counted here, for each storage, while such a view is alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from ..world import shards_of
from .memory_notes import MemoryNotes, notes_of

_FEW = 8
State = tuple[int, ...] | None
"""Counts of the writes to a local shard, to be compared; None if writes are not counted, and may have happened."""


class Counter(NamedTuple):
    """A plain tensor that was handed to the user, and its version when it was noticed."""

    tensor: Tensor
    version: int


class Watcher(Protocol):
    """A view that must be recomputed after writes to its root."""

    def shard(self) -> Tensor:
        """Return the local shard that the view is made from."""

    counters: list[Counter]
    """The tensors in the memory of that shard that were handed to the user."""


_views: dict[int, weakref.ref[Watcher]] = {}
"""The live views that must be recomputed after writes, by id. Threads add and remove entries meanwhile, so it is copied
in one step and never counted."""


def watch(view: Watcher) -> None:
    """Count writes as long as this view is alive."""
    number = id(view)
    _views[number] = weakref.ref(view, lambda _: _views.pop(number, None))
    for shard in shards_of(view.shard()):
        handed = [tensor for ref in notes_of(shard).handed_out or () if (tensor := ref()) is not None]
        view.counters += [Counter(tensor, tensor._version) for tensor in handed]


def count_writes_through(handed: Tensor, memory: Sequence[MemoryNotes]) -> None:
    """Count writes to a tensor exposed to the user that shares memory with a local shard, but is not the shard.

    `memory` are the notes on that memory, as `mark_exposed` returns them.
    """
    for notes in memory:
        ref, before = weakref.ref(handed), notes.handed_out
        if not before:
            notes.handed_out = [ref]
        elif before[-1]() is None:  # dead references are dropped: the last one at once, the others now and then
            before[-1] = ref
        else:
            before.append(ref)
            count = len(before)
            if count >= _FEW and not count & (count - 1):
                notes.handed_out = [ref for ref in before if ref() is not None]
    if _views:
        for view in [view for ref in [*_views.values()] if (view := ref()) is not None]:
            if not set(memory).isdisjoint(map(notes_of, shards_of(view.shard()))):
                view.counters.append(Counter(handed, handed._version))


def writes_through(counters: Sequence[Counter]) -> int:
    """Return how often these tensors were written since they were recorded."""
    return sum(tensor._version - version for tensor, version in counters)


def count_write(local: Tensor) -> None:
    """Record that an op on distributed tensors wrote a local shard."""
    if _views:
        for shard in shards_of(local):
            notes_of(shard).writes += 1


def count_writes(local: Sequence[Tensor]) -> None:
    """Record that an op wrote the local shards of a list."""
    if _views:
        for each in local:
            count_write(each)


def writes_to(local: Tensor) -> State:
    """Return how often a local shard was written, by any path."""
    shards = shards_of(local)
    if local.is_inference() or any(shard.is_inference() for shard in shards):
        return None
    # The shards of simulated ranks are written together, or rank by rank.
    return (local._version, *(shard._version for shard in shards), *(notes_of(shard).writes for shard in shards))
