"""One-entry cache of the last prepared module input.

Several modules often take the same input: q, k and v of an attention. One redistribution then serves all of them, and
one reduction in the backward pass. A write to the input or to the result invalidates the entry; it is dropped with the
input.

A kernel may write a plain input through its address, which no version counts. So a result is cached only if it shares
the memory of the plain input, as a replicated input does: then it sees every write. Data that was gathered from a plain
input is gathered again.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

from torch import Tensor, nn

from .._torch.fake_tensors import is_traced
from ..dispatch.watch import Watch
from ..sharding.base import DTensorBase
from ..sharding.runtime import WorldState
from ..world import RankTensor


class _Entry(NamedTuple):
    source: weakref.ref[Tensor]
    source_version: int
    watched: list[tuple[Watch, Tensor]]
    key: object
    result: Tensor
    result_version: int


class LastInput:
    """The last prepared input of one world."""

    def __init__(self) -> None:
        self._entry: _Entry | None = None

    def find(self, source: Tensor, key: object) -> Tensor | None:
        """Return the cached result for this tensor and key, unless either was written since."""
        entry = self._entry
        if entry is None or entry.source() is not source or entry.key != key:
            return None
        written = entry.result_version != entry.result._version or source._version != entry.source_version
        return None if written or not all(watch.unchanged(local) for watch, local in entry.watched) else entry.result

    def keep(self, source: Tensor, key: object, result: Tensor) -> None:
        """Cache this result, replacing the present entry, if writes to both are counted."""
        watched = None if result is source else _watched(source, result)
        if watched is None or result.is_inference():
            self._entry = None
        else:
            ref = weakref.ref(source, self._drop)
            self._entry = _Entry(ref, source._version, watched, key, result, result._version)

    def _drop(self, source: object) -> None:
        if self._entry is not None and self._entry.source is source:
            self._entry = None


LAST_INPUT = WorldState(LastInput)


def _watched(source: Tensor, result: Tensor) -> list[tuple[Watch, Tensor]] | None:
    """Return the local shards to watch for writes; None if results for this tensor are not cached.

    They are not for parameters, whose result should not outlive the call, for inference tensors, whose writes are not
    counted, and while tracing, since a traced tensor belongs to one graph.
    """
    # The type is compared first, since isinstance with Parameter calls Python code.
    if (type(source) is not Tensor and isinstance(source, nn.Parameter)) or source.is_inference() or is_traced():
        return None
    if not isinstance(source, DTensorBase):
        return [] if _share_memory(source, result) else None
    local, base = source._local_shard, source._base
    watched = [(Watch(local), local)]
    if isinstance(base, DTensorBase):
        watched.append((Watch(base._local_shard), base._local_shard))
    return watched


def _share_memory(source: Tensor, result: Tensor) -> bool:
    """Return whether the local shard of a result shares the memory of a plain tensor, on every rank."""
    local = result._local_shard if isinstance(result, DTensorBase) else result
    if type(source) is type(local) is Tensor:
        return source.untyped_storage() is local.untyped_storage()
    if isinstance(source, RankTensor) and isinstance(local, RankTensor):
        return all(map(_share_memory, source.shards, local.shards))
    if isinstance(source, RankTensor) or isinstance(local, RankTensor):
        return False
    return source.untyped_storage() is local.untyped_storage()
