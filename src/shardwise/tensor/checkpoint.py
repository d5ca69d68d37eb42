"""The chunks of distributed tensors that `torch.distributed.checkpoint` saves and loads.

A checkpoint stores chunks, each with its global offset. A local shard is one chunk, or several where the sharding is
interleaved; a tensor loads on any mesh, since the reader looks chunks up by offset. In the simulated world this process
writes and reads the chunks of every rank.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ..errors import PlacementError
from ..sharding.layout import Coordinate
from ..sharding.spec import DTensorSpec
from ..world import RankTensor


class Chunk(NamedTuple):
    """A box of the global tensor and the view of a local shard that holds it."""

    offset: torch.Size
    size: torch.Size
    data: Tensor


def chunks_of(local: Tensor, spec: DTensorSpec) -> list[Chunk]:
    """Return the chunks that this process holds. An empty shard has none; the first one of an empty tensor has one."""
    return [chunk for chunks in chunks_by_rank(local, spec).values() for chunk in chunks]


def chunks_by_rank(local: Tensor, spec: DTensorSpec) -> dict[int, list[Chunk]]:
    """Return the chunks by rank: of all ranks of the mesh in a simulated world, else of this one."""
    if spec.layout.partial:
        raise PlacementError(
            f"{spec!r} cannot be saved or loaded while it is Partial: no rank holds its values",
            "redistribute it first, e.g. x.redistribute(placements=[Replicate(), ...])",
        )
    mesh_info = spec.mesh_info
    if isinstance(local, RankTensor):
        shards = zip(mesh_info.ranks, mesh_info.coordinates, local.shards, strict=True)
        return {rank: _chunks_at(spec, at, shard) for rank, at, shard in shards}
    return {} if mesh_info.outside else {dist.get_rank(): _chunks_at(spec, mesh_info.coordinate, local)}


def _chunks_at(spec: DTensorSpec, at: Coordinate, local: Tensor) -> list[Chunk]:
    if local.numel() == 0:
        first = not any(at) and spec.shape.numel() == 0
        return [Chunk(torch.Size([0] * spec.ndim), spec.shape, local.view(spec.shape))] if first else []
    starts = [_local_starts(runs) for runs in spec.layout.runs(at)]
    chunks = []
    for box in itertools.product(*starts):
        data = local
        for dim, (begin, _, length) in enumerate(box):
            if data.shape[dim] != length:
                data = data.narrow(dim, begin, length)
        offset = torch.Size(start for _, start, _ in box)
        chunks.append(Chunk(offset, torch.Size(length for _, _, length in box), data))
    return chunks


def _local_starts(runs: tuple[tuple[int, int], ...]) -> list[tuple[int, int, int]]:
    """Return for each run its local start, its global start and its length."""
    result, begin = [], 0
    for start, stop in runs:
        result.append((begin, start, stop - start))
        begin += stop - start
    return result


def write_items(name: str, local: Tensor, spec: DTensorSpec) -> list[WriteItem]:
    """Return the items to write; of replicas, one writes a chunk."""
    items, seen = [], set()
    for index, chunk in enumerate(chunks_of(local, spec)):
        if chunk.offset in seen:
            continue
        seen.add(chunk.offset)
        data = TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=chunk.offset, sizes=chunk.size),
            properties=TensorProperties.create_from_tensor(chunk.data),
            size=spec.shape,
        )
        items.append(WriteItem(MetadataIndex(name, chunk.offset, index), WriteItemType.SHARD, tensor_data=data))
    return items


def chunk_list(local: Tensor, spec: DTensorSpec) -> list[ChunkStorageMetadata]:
    """Return the boxes that this process loads, those of each replica included."""
    return [ChunkStorageMetadata(offsets=chunk.offset, sizes=chunk.size) for chunk in chunks_of(local, spec)]


def shard_at(index: MetadataIndex, local: Tensor, spec: DTensorSpec) -> Tensor:
    """Return the view of a local shard at a checkpoint index."""
    chunks = chunks_of(local, spec)
    if index.index is not None and index.index < len(chunks) and chunks[index.index].offset == index.offset:
        return chunks[index.index].data
    for chunk in chunks:
        if chunk.offset == index.offset:
            return chunk.data
    raise PlacementError(
        f"this process holds no chunk of {spec!r} at offset {list(index.offset or ())}",
        f"use one of the offsets {[list(chunk.offset) for chunk in chunks]}",
    )
