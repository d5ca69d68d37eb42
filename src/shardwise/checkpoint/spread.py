"""Assign boxes to the ranks that write them: every box once, about the same number of bytes on each rank.

A box that several ranks hold is written by one of them. A large one is split into pieces, one for each holder, so that
a replicated embedding does not keep one rank busy while the others wait.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch

from ..errors import CheckpointError
from .held import Box, Held

SPLIT = 1 << 20
"""Replicated boxes are split into pieces of at least this many bytes."""


class Piece(NamedTuple):
    """A box to write. `inside` is the offset of the rank's box that contains it."""

    name: str
    dtype: torch.dtype
    offset: tuple[int, ...]
    size: tuple[int, ...]
    inside: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The number of bytes of its elements."""
        return math.prod(self.size) * self.dtype.itemsize


class Tensors(NamedTuple):
    """Dtype and shape of all tensors by name, and the ranks that hold each box."""

    described: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    holders: dict[tuple[str, Box], list[int]]


def merged(held: Mapping[int, Iterable[Held]]) -> Tensors:
    """Return the boxes of all ranks as one table. Raise an error if ranks disagree on a dtype or shape."""
    described: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    first: dict[str, int] = {}
    holders: dict[tuple[str, Box], list[int]] = {}
    for rank, tensors in held.items():
        for name, dtype, shape, boxes in tensors:
            known = described.setdefault(name, (dtype, shape))
            if known != (dtype, shape):
                raise CheckpointError(
                    f"{name!r} is {_text(*known)} on rank {first[name]}, but {_text(dtype, shape)} on rank {rank}",
                    "give tensors that differ between ranks different names, or make them DTensors",
                )
            first.setdefault(name, rank)
            for box in boxes:
                holders.setdefault((name, box), []).append(rank)
    return Tensors(described, holders)


def spread(tensors: Tensors, ranks: int) -> dict[int, list[Piece]]:
    """Return the pieces that each rank writes, in the order of the state."""
    loads = [0] * ranks
    owned: list[tuple[int, int, Piece]] = []
    shared: list[tuple[int, list[int], Piece]] = []
    for (name, box), holders in tensors.holders.items():
        for piece in _pieces(name, tensors.described[name][0], box, len(holders)):
            place = len(owned) + len(shared)
            if len(holders) == 1:
                loads[holders[0]] += piece.nbytes
                owned.append((place, holders[0], piece))
            else:
                shared.append((place, holders, piece))
    for place, holders, piece in sorted(shared, key=lambda item: -item[2].nbytes):  # large ones first
        writer = min(holders, key=loads.__getitem__)
        loads[writer] += piece.nbytes
        owned.append((place, writer, piece))
    found: dict[int, list[Piece]] = {rank: [] for rank in range(ranks)}
    for _, writer, piece in sorted(owned, key=lambda item: item[0]):
        found[writer].append(piece)
    return found


def _pieces(name: str, dtype: torch.dtype, box: Box, holders: int) -> Iterator[Piece]:
    """Yield a box, split along its first dim with more than one index into at most one piece for each holder."""
    offset, size = box
    box_piece = Piece(name, dtype, offset, size, offset)
    count = min(holders, box_piece.nbytes // SPLIT)
    dim = next((dim for dim, length in enumerate(size) if length > 1), None)
    if count < 2 or dim is None:
        yield box_piece
        return
    step = -(-size[dim] // count)
    for start in range(0, size[dim], step):
        length = min(step, size[dim] - start)
        yield box_piece._replace(
            offset=(*offset[:dim], offset[dim] + start, *offset[dim + 1 :]),
            size=(*size[:dim], length, *size[dim + 1 :]),
        )


def check_complete(tensors: Tensors) -> None:
    """Raise an error if the boxes of a tensor do not have as many elements as the tensor."""
    volumes: dict[str, int] = {}
    for name, (_, size) in tensors.holders:
        volumes[name] = volumes.get(name, 0) + math.prod(size)
    for name, (dtype, shape) in tensors.described.items():
        if volumes.get(name, 0) != math.prod(shape):
            raise CheckpointError(
                f"{name!r} is {_text(dtype, shape)} with {math.prod(shape)} elements, but the ranks that save hold "
                f"{volumes.get(name, 0)}",
                "call save on all ranks of its mesh, each with the tensor in its state",
            )


def _text(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"
