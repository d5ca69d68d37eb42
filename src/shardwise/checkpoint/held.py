"""The boxes of tensors that the ranks of this process hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import WriteItem

from ..errors import CheckpointError
from ..sharding.base import DTensorBase
from ..tensor.checkpoint import Chunk, chunks_by_rank
from ..world import RankTensor
from .ranks import Ranks

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and sizes in the global tensor."""


class Held(NamedTuple):
    """A tensor of the state, and the boxes of it that one rank holds."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


def chunks_of(name: str, tensor: Tensor, ranks: Ranks) -> dict[int, list[Chunk]]:
    """Return the chunks of a tensor that the ranks of this process hold, by rank. Every rank holds a plain tensor."""
    if isinstance(tensor, DTensorBase):
        found = chunks_by_rank(tensor._local_shard, tensor._spec)
        return {rank: chunks for rank, chunks in found.items() if rank in ranks.mine}
    if is_other(tensor):
        return {ranks.mine[0]: chunks_of_other(name, tensor)}
    _check_plain(name, tensor)
    shards: Sequence[Tensor] = tensor.shards if isinstance(tensor, RankTensor) else [tensor] * len(ranks.mine)
    offset = torch.Size([0] * tensor.ndim)
    return {rank: [Chunk(offset, shard.shape, shard)] for rank, shard in zip(ranks.mine, shards, strict=True)}


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of the global tensor."""
    return tuple(map(int, tensor.shape))


def boxes_of(chunks: Iterable[Chunk]) -> tuple[Box, ...]:
    """Return offsets and sizes of chunks."""
    return tuple((tuple(chunk.offset), tuple(chunk.size)) for chunk in chunks)


def is_other(tensor: Tensor) -> bool:
    """Return whether a tensor is another library's distributed tensor: it has the protocol, and is not a DTensor."""
    return hasattr(tensor, "__create_write_items__") and not isinstance(tensor, DTensorBase)


def chunks_of_other(name: str, tensor: Any) -> list[Chunk]:
    """Return the chunks of another library's distributed tensor, by the protocol of torch.distributed.checkpoint."""
    items: list[WriteItem] = tensor.__create_write_items__(name, tensor)
    chunks = []
    for item in items:
        assert item.tensor_data is not None, "items of a tensor have its data"
        box = item.tensor_data.chunk
        chunks.append(Chunk(box.offsets, box.sizes, tensor.__get_tensor_shard__(item.index)))
    return chunks


def _check_plain(name: str, tensor: Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout)
        raise CheckpointError(
            f"{name!r} is a {kind} tensor, which cannot be stored", "store a dense one: x.to_dense() or x.dequantize()"
        )
    if isinstance(tensor, RankTensor) and len({shard.shape for shard in tensor.shards}) > 1:
        raise CheckpointError(
            f"{name!r} is a plain tensor of different sizes on the ranks, and plain tensors must be replicated",
            "make it a DTensor, e.g. DTensor.from_local(x, mesh, [Shard(0)])",
        )
