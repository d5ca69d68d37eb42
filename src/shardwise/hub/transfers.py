"""The elements that each rank reads and writes: the intersections of its local shards with stored tensors."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..sharding.base import DTensorBase
from ..sharding.layout import Run, chunk_range, dim_axes
from ..sharding.spec import DTensorSpec
from ..world import RankTensor, current_world
from .files import Stored
from .mosaic import Mosaic, row_major
from .positioned import Sizes, Transfer


class Patch(NamedTuple):
    """A box of elements that are at regular distances both in a tensor of the model and in a stored tensor."""

    name: str
    size: Sizes
    offset: int
    """The index of the first element in the tensor of the model, counted in row-major order."""
    strides: Sizes
    """For each dim of the box, the distance of neighbours in the tensor of the model, in elements."""
    stored: Stored
    stored_offset: int
    stored_strides: Sizes


def patches_to_save(entry: Mosaic, stored: Stored) -> list[Patch]:
    """Return the patches of a stored tensor that is assembled from tensors of the model."""
    strides = row_major(stored.shape)
    return [
        Patch(piece.source, piece.size, piece.offset, piece.strides, stored, _dot(piece.at, strides), strides)
        for piece in entry.pieces
    ]


def patches_to_load(entry: Mosaic, contents: Mosaic, stored: Mapping[str, Stored]) -> list[Patch]:
    """Return the patches of an entry, a tensor of the model or a part of it, that is assembled from stored tensors."""
    (own,) = entry.pieces
    return [
        Patch(
            own.source,
            piece.size,
            own.offset + _dot(piece.at, own.strides),
            own.strides,
            stored[piece.source],
            piece.offset,
            piece.strides,
        )
        for piece in contents.pieces
    ]


def _dot(index: Sizes, strides: Sizes) -> int:
    return sum(i * stride for i, stride in zip(index, strides, strict=True))


# ---- patches as boxes of the model's tensors -------------------------------------------------------------------------


class Box(NamedTuple):
    """A box of a tensor of the model, with steps, whose elements are at regular distances in a stored tensor."""

    start: Sizes
    counts: Sizes
    steps: Sizes
    stored_offset: int
    stored_strides: Sizes
    """For each dim of the model's tensor."""


class _Loop(NamedTuple):
    """A dim of a patch: its size, and its strides in the tensor of the model and in the stored tensor."""

    length: int
    stride: int
    stored_stride: int


def boxes_of(patch: Patch, shape: Sizes) -> Iterator[Box]:
    """Yield the boxes of a patch in the tensor of the model, which has this shape. Most patches are one box."""
    loops = map(_Loop._make, zip(patch.size, patch.strides, patch.stored_strides, strict=True))
    if 0 not in patch.size:
        yield from _boxes(patch.offset, patch.stored_offset, _joined(loops), shape)


def _joined(loops: Iterable[_Loop]) -> list[_Loop]:
    """Return the loops of more than one index, outermost first; two that are contiguous on both sides are joined."""
    found: list[_Loop] = []
    for loop in sorted((loop for loop in loops if loop.length > 1), key=lambda loop: -loop.stride):
        outer = found[-1] if found else None
        distances = (loop.length * loop.stride, loop.length * loop.stored_stride)
        if outer is not None and (outer.stride, outer.stored_stride) == distances:
            found[-1] = _Loop(outer.length * loop.length, loop.stride, loop.stored_stride)
        else:
            found.append(loop)
    return found


def _boxes(offset: int, stored_offset: int, loops: list[_Loop], shape: Sizes) -> Iterator[Box]:
    """Yield boxes in which each dim has at most one loop, and no loop leaves its dim."""
    strides = row_major(shape)
    start = tuple(offset // stride % size for size, stride in zip(shape, strides, strict=True))
    by_dim: dict[int, _Loop] = {}
    pending = list(loops)
    while pending:
        loop = pending.pop()
        dim = next(dim for dim, stride in enumerate(strides) if shape[dim] > 1 and stride <= loop.stride)
        step, odd = divmod(loop.stride, strides[dim])
        turn, incomplete = divmod(shape[dim], step)
        room = -(-(shape[dim] - start[dim]) // step)
        if odd or (loop.length > room and incomplete):
            starts = range(loop.length)
        elif loop.length <= room:
            other = by_dim.get(dim)
            by_dim[dim] = loop
            if other is None:
                continue
            loop, by_dim[dim] = sorted((loop, other))  # unroll the shorter one
            starts = range(loop.length)
        elif room == turn and loop.length % turn == 0:  # goes through the dim several times: split off an outer loop
            pending.append(_Loop(loop.length // turn, loop.stride * turn, loop.stored_stride * turn))
            pending.append(loop._replace(length=turn))
            continue
        else:
            starts = range(0, loop.length, loop.length // turn * turn if room == turn else room)[:2]
        for first, stop in zip(starts, [*starts[1:], loop.length], strict=True):
            part = [loop._replace(length=stop - first)] if stop - first > 1 else []
            at = offset + first * loop.stride, stored_offset + first * loop.stored_stride
            yield from _boxes(*at, [*by_dim.values(), *pending, *part], shape)
        return
    every = range(len(shape))
    yield Box(
        start,
        tuple(by_dim[dim].length if dim in by_dim else 1 for dim in every),
        tuple(by_dim[dim].stride // strides[dim] if dim in by_dim else 1 for dim in every),
        stored_offset,
        tuple(by_dim[dim].stored_stride if dim in by_dim else 0 for dim in every),
    )


# ---- the shards of this process --------------------------------------------------------------------------------------


class HeldShard(NamedTuple):
    """The local shard of a rank. It is number `replica` of the `replicas` with the same elements."""

    rank: int
    local: Tensor
    runs: tuple[tuple[Run, ...], ...]
    """For each dim, the ranges of indices that the shard holds."""
    replica: int
    replicas: int


def held_shards(tensor: Tensor) -> list[HeldShard]:
    """Return the shards that this process holds: its own, or in a simulated world those of all ranks.

    Every rank of the world holds a plain tensor; a simulated world has one copy, unless it is a RankTensor.
    """
    if isinstance(tensor, DTensorBase):
        return _of_distributed(tensor._local_shard.detach(), tensor._spec)
    tensor = tensor.detach()
    if isinstance(tensor, RankTensor):
        return [_replica(rank, shard, len(tensor.shards)) for rank, shard in enumerate(tensor.shards)]
    ranks = dist.get_world_size() if dist.is_initialized() and current_world() is None else 1
    return [_replica(dist.get_rank() if ranks > 1 else 0, tensor, ranks)]


def _replica(rank: int, tensor: Tensor, ranks: int) -> HeldShard:
    """Return the shard of a rank that has all elements of a tensor, replicated over this many ranks."""
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
    """Yield each rank with its coordinate, and the index of its instance of the mesh."""
    mesh_info = spec.mesh_info
    instance_of = {rank: i for i, ranks in enumerate(mesh_info.instances.flatten(1).tolist()) for rank in ranks}
    for rank, at in zip(mesh_info.ranks, mesh_info.coordinates, strict=True):
        yield rank, at, instance_of[rank]


def transfers_of(stored: Stored, box: Box, shard: HeldShard) -> Iterator[Transfer]:
    """Yield transfers of the elements of a box that a shard holds."""
    common = [list(_common(runs, *sizes)) for runs, *sizes in zip(shard.runs, *box[:3], strict=True)]
    local, strides = shard.local, shard.local.stride()
    for parts in itertools.product(*common):
        dims = sorted((d for d, (_, _, count) in enumerate(parts) if count > 1), key=lambda d: -box.stored_strides[d])
        view = torch.as_strided(
            local,
            [parts[dim][2] for dim in dims],
            [strides[dim] * box.steps[dim] for dim in dims],
            local.storage_offset() + _dot(tuple(begin for begin, _, _ in parts), strides),
        )
        offset = box.stored_offset + _dot(tuple(first for _, first, _ in parts), box.stored_strides)
        yield Transfer(stored, offset, tuple(box.stored_strides[dim] for dim in dims), view)


def _common(runs: tuple[Run, ...], start: int, count: int, step: int) -> Iterator[tuple[int, int, int]]:
    """Yield for each run with indices `start + i * step`: the offset of the first in the shard, its i, their number."""
    begin = 0
    for low, high in runs:
        first, stop = max(0, -((start - low) // step)), min(count, -((start - high) // step))
        if first < stop:
            yield begin + start + first * step - low, first, stop - first
        begin += high - low


# ---- who writes ------------------------------------------------------------------------------------------------------

SPLIT = 1 << 20
"""Replicas divide a transfer of at least this many bytes among themselves."""


def share(transfer: Transfer, shard: HeldShard, number: int) -> Transfer | None:
    """Return the part of a transfer that this rank writes, if any. `number` spreads small transfers over replicas."""
    ranks, turn = shard.replicas, (shard.replica + number) % shard.replicas
    if ranks == 1:
        return transfer
    stored, offset, strides, view = transfer
    if not view.dim() or transfer.nbytes < SPLIT:
        return transfer if turn == 0 else None
    low, high = chunk_range(0, view.shape[0], ranks, turn)
    if low == high:
        return None
    return Transfer(stored, offset + low * strides[0], strides, view.narrow(0, low, high - low))
