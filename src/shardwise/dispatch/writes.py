"""Counting writes to local shards, for views that must be made again after a write.

PyTorch counts the writes that a user makes to a local shard, in the shard's version. It does not count those that ops
on distributed tensors make, below autograd. These are counted here, by storage, while somebody watches.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import Tensor

from ..world import RankTensor

State = tuple[int, ...] | None
"""How often a local shard was written; None if nobody counts: assume that it was."""


class _Watchers:
    """How many views are alive that must know of writes."""

    count = 0


def watch(view: object) -> None:
    """Count writes as long as this object lives."""
    _Watchers.count += 1
    weakref.finalize(view, _unwatch).atexit = False


def _unwatch() -> None:
    _Watchers.count -= 1


def count_write(local: Tensor) -> None:
    """Note that an op on distributed tensors wrote a local shard."""
    if _Watchers.count:
        for shard in _shards(local):
            storage = shard.untyped_storage()
            storage._writes_by_shardwise = _writes(shard) + 1  # type: ignore[attr-defined]


def count_writes(local: Sequence[Tensor]) -> None:
    """The same for the local shards of a list."""
    if _Watchers.count:
        for each in local:
            count_write(each)


def writes_to(local: Tensor) -> State:
    """How often a local shard was written, by anybody."""
    shards = _shards(local)
    if local.is_inference() or any(shard.is_inference() for shard in shards):
        return None
    # Simulated ranks are written as one, or rank by rank.
    return (local._version, *(shard._version for shard in shards), *map(_writes, shards))


def _shards(local: Tensor) -> tuple[Tensor, ...]:
    return local.shards if isinstance(local, RankTensor) else (local,)


def _writes(shard: Tensor) -> int:
    count: int = getattr(shard.untyped_storage(), "_writes_by_shardwise", 0)
    return count
