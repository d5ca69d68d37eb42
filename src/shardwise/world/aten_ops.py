"""Ops of `torch.ops.aten` that need functions of their own on RankTensors. Each function is named after its op."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .implementation import implements
from .mapping import join_views, map_op
from .rank_int import rank_int
from .rank_op import describe
from .rank_tensor import RankTensor

aten = implements("aten")
_AS_STRIDED = describe(torch.ops.aten.as_strided.default)


@aten
def detach(x: RankTensor) -> object:
    """Return a tensor with the same shards, which have no autograd state to be detached from."""
    return join_views(x.shards, x)


@aten
def alias(x: RankTensor) -> object:
    """Return a tensor with the same shards."""
    return join_views(x.shards, x)


@aten
def as_strided(
    x: RankTensor,
    size: Sequence[int | torch.SymInt],
    stride: Sequence[int | torch.SymInt],
    storage_offset: int | torch.SymInt | None = None,
) -> object:
    """Run `as_strided` on every shard, from its own offset plus `storage_offset - x.storage_offset()`.

    The offsets of shards may differ; `x.storage_offset()` is 0 then.
    """
    if storage_offset is not None:
        starts = [int(s.storage_offset()) for s in x.shards]
        storage_offset = rank_int(starts) + (storage_offset - x.storage_offset())
    return join_views(map_op(_AS_STRIDED, (x, size, stride, storage_offset), None), x)
