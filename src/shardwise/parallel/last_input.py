"""One-entry cache of the last prepared module input.

Several modules often take the same input: q, k and v of an attention. One redistribution then serves all of them, and
one reduction in the backward pass. A write by an op on distributed tensors invalidates the entry, as does a write of
the user to the input or the result, and other data of the input (`x.data = y`). It is dropped with the input.

A kernel may write a plain tensor through its address, which no version counts. So if the input or the result is plain,
the result is cached only if it shares the memory of the input, as that of a replicated input does: then it sees every
write. Data that was gathered from or into a plain tensor is gathered again.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

from torch import Tensor, nn

from .._torch.fake_tensors import is_traced
from ..dispatch.gather_cache import GatherCache
from ..dispatch.watch import Watch
from ..sharding.base import DTensorBase
from ..world import RankTensor


class _Entry(NamedTuple):
    source: weakref.ref[Tensor]
    source_version: int
    watches: list[Watch] | None
    """None for a plain tensor and a result that share their memory."""
    key: object
    result: Tensor
    result_version: int


class LastInput:
    """The last prepared input of one world, which is kept beside its last redistributed operand."""

    def __init__(self, cache: GatherCache) -> None:
        self._cache = cache

    @property
    def _entry(self) -> _Entry | None:
        found = self._cache.prepared_input
        assert found is None or isinstance(found, _Entry)
        return found

    def find(self, source: Tensor, key: object) -> Tensor | None:
        """Return the cached result for this tensor and key, unless either was written since."""
        entry = self._entry
        if entry is None or entry.source() is not source or entry.key != key:
            return None
        result = entry.result
        if entry.result_version != result._version or source._version != entry.source_version:
            return None
        if entry.watches is None:  # after `x.data = y` they share no memory
            return result if _share_memory(source, result) else None
        shards = zip(entry.watches, _shards_read(source, result), strict=True)
        return result if all(watch.unchanged(shard) for watch, shard in shards) else None

    def keep(self, source: Tensor, key: object, result: Tensor) -> None:
        """Cache this result, replacing the present entry, if writes to both are counted."""
        self._cache.prepared_input = None
        if result is source or not _may_be_kept(source) or result.is_inference():
            return
        watches = None
        if isinstance(source, DTensorBase) and isinstance(result, DTensorBase):
            watches = [Watch(shard) for shard in _shards_read(source, result)]
        elif not _share_memory(source, result):
            return
        ref = weakref.ref(source, self._drop)
        self._cache.prepared_input = _Entry(ref, source._version, watches, key, result, result._version)

    def _drop(self, source: object) -> None:
        if self._entry is not None and self._entry.source is source:
            self._cache.prepared_input = None


def _may_be_kept(source: Tensor) -> bool:
    """Return whether results for this tensor are cached.

    They are not for parameters, whose result should not outlive the call, for inference tensors, whose writes are not
    counted, and while tracing, since a traced tensor belongs to one graph.
    """
    # The type is compared first, since isinstance with Parameter calls Python code.
    is_parameter = type(source) is not Tensor and isinstance(source, nn.Parameter)
    return not (is_parameter or source.is_inference() or is_traced())


def _shards_read(source: Tensor, result: Tensor) -> list[Tensor]:
    """The local shards to watch: of an input, of what it views, and of the result, which a module may write."""
    return [each._local_shard for each in (source, source._base, result) if isinstance(each, DTensorBase)]


def _share_memory(source: Tensor, result: Tensor) -> bool:
    """Return whether a result is in the memory of an input, on every rank."""
    one = source._local_shard if isinstance(source, DTensorBase) else source
    other = result._local_shard if isinstance(result, DTensorBase) else result
    if isinstance(one, RankTensor) and isinstance(other, RankTensor):
        return all(map(_share_memory, one.shards, other.shards))
    if isinstance(one, RankTensor) or isinstance(other, RankTensor):
        return False
    return one.untyped_storage() is other.untyped_storage()
