"""Which elements of the global tensor a rank holds, as a strided box of flat indices.

Whatever the placements (interleaved, uneven, over several mesh axes), a rank holds a range of every factor of its
layout. The flat, row-major indices of these elements are an offset, and a size and a stride for each factor; adjacent
factors that form one range are merged. A shard of the first dim is a box of one size, a shard of the last dim of two.

>>> box_of(from_placements((4,), (8, 6), [Shard(1)]), (1,))
Box(offset=2, sizes=(8, 2), strides=(6, 1))
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..sharding.layout import Coordinate, Layout


class Box(NamedTuple):
    """The flat indices `offset + i * strides[0] + j * strides[1] + ...` with `i < sizes[0]` and so on, row by row."""

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of indices."""
        return math.prod(self.sizes)

    def halved(self) -> Box | None:
        """Return the box of the pairs (0, 1), (2, 3), ... that make up this one; None where it holds half a pair."""
        *sizes, last = self.sizes
        *strides, step = self.strides
        even = step == 1 and last % 2 == 0 and self.offset % 2 == 0 and all(stride % 2 == 0 for stride in strides)
        if not even:
            return None
        return Box(self.offset // 2, (*sizes, last // 2), (*(stride // 2 for stride in strides), 1))

    def every_other(self, dim: int, first: int) -> Box:
        """Return the indices at the even (first = 0) or odd (first = 1) positions of a dim."""
        size, stride = self.sizes[dim], self.strides[dim]
        sizes = (*self.sizes[:dim], (size - first + 1) // 2, *self.sizes[dim + 1 :])
        return Box(self.offset + first * stride, sizes, (*self.strides[:dim], 2 * stride, *self.strides[dim + 1 :]))


@lru_cache(maxsize=16384)
def box_of(layout: Layout, at: Coordinate) -> Box:
    """Return the indices that the rank at this coordinate holds; Partial axes count as replicated."""
    dims = zip(layout.dims, layout.ranges(at), strict=True)
    factors = [pair for dim, ranges in dims for pair in zip(dim, ranges, strict=True)]
    offset, stride = 0, 1
    merged: list[tuple[int, int]] = []  # (size, stride), last first
    for factor, (start, stop) in reversed(factors):
        offset += start * stride
        if stop - start != 1 or not merged:
            if merged and merged[-1][0] * merged[-1][1] == stride:
                merged[-1] = (merged[-1][0] * (stop - start), merged[-1][1])
            elif merged and merged[-1][0] == 1:
                merged[-1] = (stop - start, stride)
            else:
                merged.append((stop - start, stride))
        stride *= factor.size
    sizes, strides = zip(*reversed(merged or [(1, 1)]), strict=True)
    return Box(offset, sizes, strides)


Place = tuple[int | slice, ...]


def counters(box: Box, limit: int, device: torch.device) -> Iterator[tuple[Place, Tensor]]:
    """Yield the indices in pieces of about `limit`, each with its place in a tensor of the box's sizes."""
    if not box.numel:
        return
    inner, depth = 1, len(box.sizes)
    while depth > 1 and inner * box.sizes[depth - 1] <= limit:
        depth -= 1
        inner *= box.sizes[depth]
    length, stride = box.sizes[depth - 1], box.strides[depth - 1]
    block = _indices(box.sizes[depth:], box.strides[depth:], device)
    step = max(1, limit // inner)
    for place in itertools.product(*map(range, box.sizes[: depth - 1])):
        offset = box.offset + sum(index * by for index, by in zip(place, box.strides, strict=False))
        for first in range(0, length, step):
            last = min(first + step, length)
            indices = torch.arange(offset + first * stride, offset + last * stride, stride, device=device)
            piece = indices if block is None else indices.view(-1, *[1] * block.dim()) + block
            yield (*place, slice(first, last)), piece


def _indices(sizes: tuple[int, ...], strides: tuple[int, ...], device: torch.device) -> Tensor | None:
    """Return the indices of a box without offset, in a tensor of its sizes; None for a box without dims."""
    found: Tensor | None = None
    for size, stride in zip(sizes, strides, strict=True):
        steps = torch.arange(size, device=device) * stride
        found = steps if found is None else found.unsqueeze(-1) + steps
    return found
