"""One-entry cache of the last redistributed operand, so that ops in a row that need the same one share it.

q, k and v of an attention read one input: one gather serves all three. The entry is dropped with the tensor it was made
from, so that memory is not held for long, and is not used after a write to either of the two.

Every write that goes through dispatch empties the cache. Local shards are watched (see `watch`), so that whether the
entry is used does not depend on which rank looked at its shard: a rank that gathers alone would wait forever.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..comm.redistribute import redistribute_local
from ..sharding.base import DTensorBase
from ..sharding.runtime import Runtime, WorldState, on_activate
from ..sharding.spec import DTensorSpec
from .watch import Watch, WatchingCache, use_cache
from .writes import count_write, count_writes


class GatheredOperand(NamedTuple):
    """The last redistributed operand of an op."""

    root: weakref.ref[DTensorBase]
    source: DTensorSpec
    target: DTensorSpec
    result: Tensor
    watch: Watch
    """Of the local shard and of the result."""


class PreparedInput(NamedTuple):
    """The last prepared input of a module (`parallel/last_input`)."""

    source: weakref.ref[Tensor]
    source_version: int
    key: object
    result: Tensor
    result_version: int
    watch: Watch | None
    """None for a plain tensor and a result that share their memory."""


class GatherCache(WatchingCache):
    """The last redistributed operand of one world, and the last prepared input. Both end with any write."""

    operand: GatheredOperand | None = None
    prepared_input: PreparedInput | None = None

    def find(self, tensor: DTensorBase, target: DTensorSpec) -> Tensor | None:
        """Return the cached local shard of `tensor` under the target spec, unless it was written since."""
        entry = self.operand
        if entry is None or entry.target is not target or entry.source is not tensor._spec:
            return None
        if entry.root() is not root_of(tensor):
            return None
        return entry.result if entry.watch.unchanged(tensor._local_shard, entry.result) else None

    def keep(self, tensor: DTensorBase, target: DTensorSpec, result: Tensor) -> None:
        """Cache `result`, the local shard of `tensor` under the target spec, replacing the present entry."""
        root, local = root_of(tensor), tensor._local_shard
        # Writes to inference tensors are not counted.
        if local.is_inference() or result.is_inference() or result is local or is_weight(root):
            self.operand = None
        else:
            watch = Watch(local, result)
            self.operand = GatheredOperand(weakref.ref(root, self._drop), tensor._spec, target, result, watch)
            watch.start()

    def _drop(self, root: object) -> None:
        entry = self.operand  # read once: other threads replace it
        if entry is not None and entry.root is root:
            self.operand = None


GATHERED = WorldState(GatherCache)


class _Active:
    """The cache of the active world."""

    cache = GatherCache()


def _use_cache_of(runtime: Runtime) -> None:
    cache = _Active.cache = GATHERED.of(runtime)
    cache.operand = cache.prepared_input = None  # it has not seen what was exposed while another world was active
    use_cache(cache)


on_activate(_use_cache_of)


def redistributed(tensor: DTensorBase, target: DTensorSpec) -> Tensor:
    """Return the local shard of a tensor under the target spec, from the cache if the last op needed the same."""
    cache = _Active.cache
    found = cache.find(tensor, target)
    if found is None:
        found = redistribute_local(tensor._local_shard, tensor._spec, target)
        cache.keep(tensor, target, found)
    return found


def forget_gathered() -> None:
    """Empty the cache: something was written."""
    cache = _Active.cache
    cache.operand = cache.prepared_input = None


def after_write(tensor: DTensorBase) -> None:
    """Update state after a write to a tensor: empty the gather cache, and let a view write its base."""
    forget_gathered()
    if tensor._source is not None:
        tensor._source.write_back(tensor)
        forget_gathered()  # write_back may have gathered the base as it was before
    else:
        count_write(tensor._local_shard)


def after_list_write(tensors: Sequence[Tensor], local: Sequence[Tensor]) -> None:
    """Update state after a write to a list of tensors without sources."""
    forget_gathered()
    increment_version(tensors)  # autograd does not count the writes of list ops; on one device the ops do
    count_writes(local)


def after_source_writes(tensors: Sequence[Tensor]) -> None:
    """Update state after a write to a list of tensors whose local shards may come from a source."""
    increment_version(tensors)
    for tensor in tensors:
        if isinstance(tensor, DTensorBase):
            after_write(tensor)


def assign(tensor: DTensorBase, value: Tensor) -> None:
    """Copy `value` into the local shard of `tensor`; along expanded dims, only its first index."""
    local, spec = tensor._local_shard, tensor._spec
    for dim, (size, stride) in enumerate(zip(spec.shape, spec.stride, strict=True)):
        if stride == 0 and size > 1:
            local, value = local[(slice(None),) * dim + (slice(1),)], value[(slice(None),) * dim + (slice(1),)]
    local.copy_(value)
    count_write(local)


def root_of(tensor: DTensorBase) -> DTensorBase:
    """Return the base of a view, or the tensor itself: views are new objects for each op, their base is one."""
    base = tensor._base
    return base if isinstance(base, DTensorBase) else tensor


def is_weight(tensor: Tensor) -> bool:
    """Return whether a tensor is a weight, which is not cached.

    Its gathered copy should not outlive the op, and a weak reference would keep modules from swapping weights when they
    are moved.
    """
    # `is_leaf` of a view would make its grad_fn again after a write.
    return isinstance(tensor, torch.nn.Parameter) or (tensor._base is None and tensor.requires_grad and tensor.is_leaf)
