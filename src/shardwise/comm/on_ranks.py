"""Functions of a rank's coordinate: a real process calls them for its own rank, the simulated world for every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from ..sharding.layout import Coordinate
from ..sharding.mesh import MeshInfo
from ..world import RankTensor, map_ranks, rank_int

LocalOp = Callable[[Tensor], Tensor]


def on_ranks(mesh_info: MeshInfo, fn: Callable[[Coordinate, Tensor], Tensor]) -> LocalOp:
    """Return a function of a local tensor, from one that also takes the coordinate of its rank."""

    def run(local: Tensor) -> Tensor:
        if isinstance(local, RankTensor):
            coordinates = mesh_info.coordinates
            return map_ranks(lambda rank, shard: fn(coordinates[rank], shard), local)
        return fn(mesh_info.coordinate, local)

    return run


def from_ranks(mesh_info: MeshInfo, fn: Callable[[Coordinate], Tensor]) -> Tensor:
    """Return a local tensor that a function makes from the coordinate of its rank."""
    if mesh_info.simulated:
        with torch.no_grad():
            return RankTensor([fn(at) for at in mesh_info.coordinates])
    return fn(mesh_info.coordinate)


def shard_outside(dims: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the local shard of a rank outside the mesh: empty, or, as in PyTorch, a 0 for a 0-dim tensor."""
    return torch.empty(0, dtype=dtype, device=device) if dims else torch.zeros((), dtype=dtype, device=device)


def split_sizes(mesh_info: MeshInfo, ranks: int, sizes_at: Callable[[Coordinate], list[int]]) -> list[int]:
    """The split sizes of an all-to-all, one for each rank of the group."""
    if not mesh_info.simulated:
        return sizes_at(mesh_info.coordinate)
    by_rank = [sizes_at(at) for at in mesh_info.coordinates]
    # Sizes that differ between ranks are SymInts, which the op takes as well as ints.
    return [cast(int, rank_int([sizes[peer] for sizes in by_rank])) for peer in range(ranks)]
