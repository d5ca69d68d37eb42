"""Functions that address the ranks of a simulated world: one call per rank, one copy per rank."""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from typing import TypeVar

import torch

from ..errors import WorldError
from .mapping import by_rank, common_number_of_ranks, join
from .rank_tensor import RankTensor
from .registry import current_world

__all__ = ["map_ranks", "replicate"]

T = TypeVar("T")


def map_ranks(fn: Callable[..., T], *tensors: object, ranks: int | None = None) -> T:
    """Return the results of `fn(rank, *local tensors)` of every rank, joined. Autograd does not record the call.

    >>> x = RankTensor([torch.ones(2), torch.ones(2)])
    >>> map_ranks(lambda rank, local: local * rank, x).shards
    (tensor([0., 0.]), tensor([1., 1.]))

    Without a per-rank argument, the number of ranks is `ranks`, or that of the running simulated world.
    """
    columns = [by_rank(t) for t in tensors]
    lengths = {len(c) for c in columns if c is not None}
    n = common_number_of_ranks(lengths) if lengths else ranks or _world_size()
    rows = [repeat(t, n) if c is None else c for t, c in zip(tensors, columns, strict=True)]
    with torch.no_grad():
        results = [fn(rank, *row) for rank, *row in zip(range(n), *rows, strict=True)]
    return join([r.detach() if isinstance(r, torch.Tensor) and r.requires_grad else r for r in results], "map_ranks")


def replicate(tensor: torch.Tensor, ranks: int | None = None) -> RankTensor:
    """Return a RankTensor with a copy of one tensor for each of `ranks` ranks (default: those of the running world).

    >>> replicate(torch.tensor([1.0]), ranks=2).shards
    (tensor([1.]), tensor([1.]))
    """
    tensor = tensor.detach() if tensor.requires_grad else tensor
    return RankTensor([tensor.clone() for _ in range(ranks or _world_size())])


def _world_size() -> int:
    world = current_world()
    if world is None:
        raise WorldError(
            "the number of ranks is unknown outside of a simulated world",
            "pass ranks=, or call this inside `with shardwise.simulate(...)`",
        )
    return world.size
