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

from torch import Tensor, nn

from .._torch.fake_tensors import is_traced
from ..dispatch.gather_cache import GatherCache, PreparedInput
from ..dispatch.watch import Watch
from ..sharding.base import DTensorBase
from ..world import shards_of


class LastInput:
    """The last prepared input of one world, which is kept beside its last redistributed operand."""

    def __init__(self, cache: GatherCache) -> None:
        self._cache = cache

    def find(self, source: Tensor, key: object) -> Tensor | None:
        """Return the cached result for this tensor and key, unless either was written since."""
        entry = self._cache.prepared_input
        if entry is None or entry.source() is not source or entry.key != key:
            return None
        result = entry.result
        if entry.result_version != result._version or source._version != entry.source_version:
            return None
        if entry.watch is None:  # after `x.data = y` they share no memory
            return result if _share_memory(source, result) else None
        assert isinstance(source, DTensorBase), "plain tensors have no watch"
        assert isinstance(result, DTensorBase), "plain tensors have no watch"
        return result if entry.watch.unchanged(*_shards_read(source, result)) else None

    def keep(self, source: Tensor, key: object, result: Tensor) -> None:
        """Cache this result, replacing the present entry, if writes to both are counted."""
        self._cache.prepared_input = None
        if result is source or not _may_be_kept(source) or result.is_inference():
            return
        watch = None
        if isinstance(source, DTensorBase) and isinstance(result, DTensorBase):
            watch = Watch(*_shards_read(source, result))
        elif not _share_memory(source, result):
            return
        ref = weakref.ref(source, self._drop)
        self._cache.prepared_input = PreparedInput(ref, source._version, key, result, result._version, watch)
        if watch is not None:
            watch.start()

    def _drop(self, source: object) -> None:
        entry = self._cache.prepared_input
        if entry is not None and entry.source is source:
            self._cache.prepared_input = None


def _may_be_kept(source: Tensor) -> bool:
    """Return whether results for this tensor are cached.

    They are not for parameters, whose result should not outlive the call, for inference tensors, whose writes are not
    counted, and while tracing, since a traced tensor belongs to one graph.
    """
    # What takes least time comes first: isinstance with Parameter calls Python code.
    is_parameter = source._base is None and source.is_leaf and isinstance(source, nn.Parameter)
    return not (is_parameter or source.is_inference() or is_traced())


def _shards_read(source: DTensorBase, result: DTensorBase) -> list[Tensor]:
    """Return the local shards to watch: of an input, of what it views, and of the result, which a module may write."""
    base = source._base
    viewed = [base._local_shard] if isinstance(base, DTensorBase) else []
    return [source._local_shard, *viewed, result._local_shard]


def _share_memory(source: Tensor, result: Tensor) -> bool:
    """Return whether a result is in the memory of an input, on every rank."""
    one = source._local_shard if isinstance(source, DTensorBase) else source
    other = result._local_shard if isinstance(result, DTensorBase) else result
    if type(one) is Tensor and type(other) is Tensor:
        return one.untyped_storage() is other.untyped_storage()
    return [shard.untyped_storage() for shard in shards_of(one)] == [s.untyped_storage() for s in shards_of(other)]
