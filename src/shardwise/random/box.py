"""Which elements of the whole a rank holds, as a strided box of flat indices.

A rank holds the product of a range of every factor of its layout, whatever the placements: interleaved, uneven, over
several axes. Numbered row by row in the whole, these are an offset and a size and stride for each factor; neighbours
that run on are merged. A cut of the first dim is one run, one of the last dim has two sizes.

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
    """Flat indices: the offset plus any index below each size times its stride, the last one fastest."""

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        """How many indices there are."""
        return math.prod(self.sizes)

    def halved(self) -> Box | None:
        """The indices of the pairs (0, 1), (2, 3), ... that make up this box; None where it holds half a pair."""
        *sizes, last = self.sizes
        *strides, step = self.strides
        even = step == 1 and last % 2 == 0 and self.offset % 2 == 0 and all(stride % 2 == 0 for stride in strides)
        if not even:
            return None
        return Box(self.offset // 2, (*sizes, last // 2), (*(stride // 2 for stride in strides), 1))

    def every_other(self, dim: int, first: int) -> Box:
        """The part at the even (first = 0) or odd (first = 1) places of a dim."""
        size, stride = self.sizes[dim], self.strides[dim]
        sizes = (*self.sizes[:dim], (size - first + 1) // 2, *self.sizes[dim + 1 :])
        return Box(self.offset + first * stride, sizes, (*self.strides[:dim], 2 * stride, *self.strides[dim + 1 :]))


@lru_cache(maxsize=65536)
def box_of(layout: Layout, at: Coordinate) -> Box:
    """What the rank at this coordinate holds; Partial axes count as replicated."""
    dims = zip(layout.dims, layout.ranges(at), strict=True)
    factors = [pair for dim, ranges in dims for pair in zip(dim, ranges, strict=True)]
    offset, stride = 0, 1
    merged: list[tuple[int, int]] = []  # from the last one
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
    """The indices in pieces of about `limit`: where in a tensor of the box's sizes each piece lies, and its indices."""
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
    """All sums of multiples of these strides, in a tensor of these sizes."""
    found: Tensor | None = None
    for size, stride in zip(sizes, strides, strict=True):
        steps = torch.arange(size, device=device) * stride
        found = steps if found is None else found.unsqueeze(-1) + steps
    return found
