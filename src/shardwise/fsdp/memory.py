"""Memory layout of a group of parameters: local shards in one flat buffer, gathered parameters in another.

A parameter is stored with its sharded dim first. Each rank holds `rows` of its rows; if sizes are uneven, the last
ranks hold fewer. All ranks of a collective send the same amount, so a piece has space for `rows` rows on every rank,
and the pieces of all ranks in a row are the gathered parameter, with unused rows at its end:

>>> arrange([(10, 4), (8,)], ranks=4, align=1).pieces
(Piece(shape=(10, 4), rows=3, start=0, gathered_start=0), Piece(shape=(8,), rows=2, start=12, gathered_start=48))

So an all-gather writes a parameter directly to where it is used, without a copy before or after.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Shape = tuple[int, ...]
View = tuple[Shape, Shape, int]
"""Sizes, strides and offset of a tensor in a buffer."""


@dataclass(frozen=True)
class Piece:
    """The place of one parameter: `start` in the flat buffer of a rank, `gathered_start` in the gathered buffer."""

    shape: Shape
    rows: int
    start: int
    gathered_start: int

    @property
    def width(self) -> int:
        """The number of elements in a row."""
        return math.prod(self.shape[1:])

    @property
    def numel(self) -> int:
        """The number of elements that a rank sends, padding rows included."""
        return self.rows * self.width

    def held(self, index: int) -> int:
        """Return the number of rows that the rank at this index of the group holds."""
        return max(0, min(self.rows, self.shape[0] - index * self.rows))

    def is_even(self, ranks: int) -> bool:
        """Return whether all ranks hold the same number of rows."""
        return self.rows * ranks == self.shape[0]


@dataclass(frozen=True)
class Arrangement:
    """The places of several parameters, and the sizes of the two buffers."""

    pieces: tuple[Piece, ...]
    ranks: int
    numel: int
    gathered_numel: int

    def padding(self) -> float:
        """Return the fraction of the gathered buffer that is padding."""
        used = sum(math.prod(piece.shape) for piece in self.pieces)
        return 1 - used / self.gathered_numel if self.gathered_numel else 0.0


def arrange(shapes: Sequence[Shape], ranks: int, align: int) -> Arrangement:
    """Return the places of parameters of these shapes (sharded dim first), in a row, at multiples of `align`."""
    pieces: list[Piece] = []
    start = gathered_start = 0
    for shape in shapes:
        piece = Piece(shape, -(-shape[0] // ranks), start, gathered_start)
        pieces.append(piece)
        start = _aligned(start + piece.numel, align)
        gathered_start = _aligned(gathered_start + piece.numel * ranks, align)
    return Arrangement(tuple(pieces), ranks, start, gathered_start)


def view_of(sizes: Shape, dim: int, start: int) -> View:
    """Return the view of a buffer at `start` whose memory has these sizes, with its first dim moved to `dim`."""
    strides = [0] * len(sizes)
    step = 1
    for i in range(len(sizes) - 1, -1, -1):
        strides[i] = step
        step *= max(sizes[i], 1)
    order = [*range(1, dim + 1), 0, *range(dim + 1, len(sizes))]
    return tuple(sizes[i] for i in order), tuple(strides[i] for i in order), start


def _aligned(offset: int, align: int) -> int:
    return -(-offset // align) * align
