"""What each rank reads and writes: the intersections of its shards with the boxes of the files."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..sharding.base import DTensorBase
from ..sharding.layout import Run, chunk_range, dim_axes
from ..sharding.spec import DTensorSpec
from ..world import RankTensor, current_world
from .files import Stored
from .mosaic import Mosaic, Piece
from .positioned import Sizes, Transfer


class Patch(NamedTuple):
    """A box of a tensor of the model that is a box of a stored tensor."""

    name: str
    start: Sizes
    size: Sizes
    """The box in the tensor of the model."""
    stored: Stored
    stored_start: Sizes
    dims: tuple[int | None, ...]
    """For each dim of the stored tensor the dim of the model's tensor, or None for one that it lacks."""


def patches_to_save(entry: Mosaic, stored: Stored) -> list[Patch]:
    """The patches of a stored tensor that is put together from tensors of the model."""
    return [
        Patch(piece.source, piece.start, _source_size(piece), stored, piece.at, piece.dims) for piece in entry.pieces
    ]


def patches_to_load(entry: Mosaic, contents: Mosaic, stored: Mapping[str, Stored]) -> list[Patch]:
    """The patches of an entry, a part of a tensor of the model, that is put together from stored tensors."""
    (own,) = entry.pieces
    found = []
    for piece in contents.pieces:
        start, size = list(own.start), [1] * len(own.start)
        for dim, source_dim in enumerate(own.dims):
            if source_dim is not None:
                start[source_dim] += piece.at[dim]
                size[source_dim] = piece.size[dim]
        dims: list[int | None] = [None] * len(piece.start)
        for dim, stored_dim in enumerate(piece.dims):
            if stored_dim is not None:
                dims[stored_dim] = own.dims[dim]
        file = stored[piece.source]
        found.append(Patch(own.source, tuple(start), tuple(size), file, piece.start, tuple(dims)))
    return found


def _source_size(piece: Piece) -> Sizes:
    size = [1] * len(piece.start)
    for dim, source_dim in enumerate(piece.dims):
        if source_dim is not None:
            size[source_dim] = piece.size[dim]
    return tuple(size)


# ---- the shards of this process --------------------------------------------------------------------------------------


class HeldShard(NamedTuple):
    """The shard of a tensor that a rank holds, and which of the ranks with the same elements that one is."""

    rank: int
    local: Tensor
    runs: tuple[tuple[Run, ...], ...]
    """For each dim the indices of the tensor that it holds."""
    replica: int
    replicas: int


def held_shards(tensor: Tensor) -> list[HeldShard]:
    """The shards that this process holds: its own, or in a simulated world those of all ranks.

    A plain tensor is held by every rank of the world; in a simulated world there is one of it.
    """
    if isinstance(tensor, DTensorBase):
        return _of_distributed(tensor._local_tensor.detach(), tensor._spec)
    tensor = tensor.detach()
    if isinstance(tensor, RankTensor):
        return [_whole(rank, shard, len(tensor.shards)) for rank, shard in enumerate(tensor.shards)]
    ranks = dist.get_world_size() if dist.is_initialized() and current_world() is None else 1
    return [_whole(dist.get_rank() if ranks > 1 else 0, tensor, ranks)]


def _whole(rank: int, tensor: Tensor, ranks: int) -> HeldShard:
    """All of a tensor, which each of these ranks holds."""
    return HeldShard(rank, tensor, tuple(((0, size),) for size in tensor.shape), rank, ranks)


def _of_distributed(local: Tensor, spec: DTensorSpec) -> list[HeldShard]:
    mesh_info = spec.mesh_info
    shards: Sequence[Tensor] = local.shards if isinstance(local, RankTensor) else [local]
    ranks = mesh_info.ranks if isinstance(local, RankTensor) else [] if mesh_info.outside else [dist.get_rank()]
    places = {rank: (at, instance) for rank, at, instance in _places(spec)}
    sharding = {axis for dim in spec.layout.dims for axis in dim_axes(dim)}
    others = [axis for axis in range(len(mesh_info.sizes)) if axis not in sharding]
    replicas = len(mesh_info.instances)
    for axis in others:
        replicas *= mesh_info.sizes[axis]
    found = []
    for rank, shard in zip(ranks, shards, strict=True) if ranks else ():
        at, replica = places[rank]
        for axis in others:
            replica = replica * mesh_info.sizes[axis] + at[axis]
        found.append(HeldShard(rank, shard, spec.layout.runs(at), replica, replicas))
    return found


def _places(spec: DTensorSpec) -> Iterator[tuple[int, tuple[int, ...], int]]:
    """For each rank its coordinate, and the number of the instance of the mesh that it is in."""
    mesh_info = spec.mesh_info
    instance_of = {rank: i for i, ranks in enumerate(mesh_info.instances.flatten(1).tolist()) for rank in ranks}
    for rank, at in zip(mesh_info.ranks, mesh_info.coordinates, strict=True):
        yield rank, at, instance_of[rank]


def transfers_of(patch: Patch, shard: HeldShard) -> Iterator[Transfer]:
    """What of a patch is in a shard."""
    common = [
        list(_common(runs, start, start + size))
        for runs, start, size in zip(shard.runs, patch.start, patch.size, strict=True)
    ]
    for box in itertools.product(*common):
        local = shard.local
        for dim, (begin, _, length) in enumerate(box):
            local = local.narrow(dim, begin, length)
        start = tuple(
            own if dim is None else own + box[dim][1] for own, dim in zip(patch.stored_start, patch.dims, strict=True)
        )
        yield Transfer(patch.stored, start, _in_dims_of_file(local, patch.dims))


def _common(runs: tuple[Run, ...], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """For each run in `[start, stop)`: where it begins in the shard, how far after `start`, and its length."""
    begin = 0
    for low, high in runs:
        first, last = max(low, start), min(high, stop)
        if first < last:
            yield begin + first - low, first - start, last - first
        begin += high - low


def _in_dims_of_file(local: Tensor, dims: tuple[int | None, ...]) -> Tensor:
    """A view with the dims of the file. Dims that one side lacks have one index."""
    sizes = [1 if dim is None else local.shape[dim] for dim in dims]
    strides = [1 if dim is None else local.stride(dim) for dim in dims]
    return torch.as_strided(local, sizes, strides, local.storage_offset())


# ---- who writes ------------------------------------------------------------------------------------------------------

SPLIT = 1 << 20
"""Boxes that several ranks hold are divided among them if they have as many bytes as this."""


def share(transfer: Transfer, shard: HeldShard, number: int) -> Transfer | None:
    """The part of a transfer that this rank writes of what its replicas hold, too; `number` spreads small ones."""
    ranks, turn = shard.replicas, (shard.replica + number) % shard.replicas
    if ranks == 1:
        return transfer
    stored, start, view = transfer
    dim = next((dim for dim, size in enumerate(view.shape) if size > 1), None)
    if dim is None or transfer.nbytes < SPLIT:
        return transfer if turn == 0 else None
    low, high = chunk_range(0, view.shape[dim], ranks, turn)
    if low == high:
        return None
    place = (*start[:dim], start[dim] + low, *start[dim + 1 :])
    return Transfer(stored, place, view.narrow(dim, low, high - low))
