"""Call a function of a rank's coordinate: for the own rank in a process, for every rank in a simulated world."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """Return the local tensor that `fn` returns for the coordinate of this rank, or of every simulated rank."""
    if mesh_info.simulated:
        with torch.no_grad():
            return RankTensor([fn(at) for at in mesh_info.coordinates])
    return fn(mesh_info.coordinate)


def shard_outside(dims: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the local shard of a rank outside the mesh: empty, or, as in PyTorch, a 0 for a 0-dim tensor."""
    return torch.empty(0, dtype=dtype, device=device) if dims else torch.zeros((), dtype=dtype, device=device)


def split_sizes(mesh_info: MeshInfo, ranks: int, sizes_at: Callable[[Coordinate], list[int]]) -> list[int]:
    """Return the split sizes of an all-to-all, one for each of the `ranks` in the group."""
    if not mesh_info.simulated:
        return sizes_at(mesh_info.coordinate)
    return joined_sizes([sizes_at(at) for at in mesh_info.coordinates])


def joined_sizes(by_rank: Sequence[Sequence[int]]) -> list[int]:
    """Return the sizes of several simulated ranks as one list.

    A size that differs between ranks is a `SymInt` with a value for each, which collectives take as they take ints.
    """
    return [cast(int, rank_int(values)) for values in zip(*by_rank, strict=True)]
