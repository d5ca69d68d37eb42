"""One-entry cache of the last prepared module input.

Several modules often take the same input: q, k and v of an attention. One redistribution then serves all of them, and
one reduction in the backward. The entry ends with a write to either tensor, and is dropped with the input.

A plain input is in the user's hands and may be written without a trace, by a kernel that has its address. So what was
made from it is kept only if it shares its memory, as a replicated input does: then every write is seen. Data that was
gathered from a plain input is gathered again.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

from torch import Tensor, nn

from ..dispatch.gather_cache import state_of as shard_state
from ..sharding.base import DTensorBase
from ..sharding.runtime import WorldState
from ..world import RankTensor


class _Entry(NamedTuple):
    source: weakref.ref[Tensor]
    state: object
    key: object
    result: Tensor
    result_version: int


class LastInput:
    """The last prepared input of one world."""

    def __init__(self) -> None:
        self._entry: _Entry | None = None

    def find(self, source: Tensor, key: object) -> Tensor | None:
        """What was made of this tensor under this key, if that was last and neither was written since."""
        entry = self._entry
        if entry is None or entry.source() is not source or entry.key != key:
            return None
        written = entry.state != state_of(source) or entry.result_version != entry.result._version
        return None if written else entry.result

    def keep(self, source: Tensor, key: object, result: Tensor) -> None:
        """Remember this in the place of what was before, if no write to either can go unseen."""
        state = state_of(source) if isinstance(source, DTensorBase) or _share_memory(source, result) else None
        if state is None or result.is_inference() or result is source:
            self._entry = None
        else:
            self._entry = _Entry(weakref.ref(source, self._drop), state, key, result, result._version)

    def _drop(self, source: object) -> None:
        if self._entry is not None and self._entry.source is source:
            self._entry = None


LAST_INPUT = WorldState(LastInput)


def state_of(tensor: Tensor) -> object:
    """How often a tensor, its local shard, and what they view were written; None where that is not counted.

    None for parameters as well: what is made from one should not outlive the call.
    """
    if tensor.is_inference() or isinstance(tensor, nn.Parameter):
        return None
    if isinstance(tensor, DTensorBase):
        base = tensor._base
        tensors = [tensor._local_tensor, *([base._local_tensor] if isinstance(base, DTensorBase) else [])]
        states = [shard_state(local) for local in tensors]  # None for shards that were handed to the user
        return None if None in states else (tensor._version, *states)
    if isinstance(tensor, RankTensor):  # written as one, or rank by rank
        versions = [state_of(shard) for shard in tensor.shards]
        return None if None in versions else (tensor._version, *versions)
    return id(tensor.untyped_storage()), tensor.storage_offset(), tensor._version


def _share_memory(source: Tensor, result: Tensor) -> bool:
    """Whether a result is the memory of a plain tensor, on every rank."""
    local = result._local_tensor if isinstance(result, DTensorBase) else result
    if isinstance(source, RankTensor) and isinstance(local, RankTensor):
        return all(map(_share_memory, source.shards, local.shards))
    if isinstance(source, RankTensor) or isinstance(local, RankTensor):
        return False
    return source.untyped_storage() is local.untyped_storage()
