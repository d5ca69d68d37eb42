"""How a tensor lies in memory: its strides, and the order of its dims from outermost to innermost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class TensorMeta(NamedTuple):
    """Shape, stride and dtype of a global tensor."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a row-major tensor of this shape."""
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def contiguous_meta(shape: Sequence[int], dtype: torch.dtype) -> TensorMeta:
    """The `TensorMeta` of a row-major tensor."""
    return TensorMeta(torch.Size(shape), contiguous_stride(shape), dtype)


def memory_order(meta: TensorMeta) -> tuple[int, ...] | None:
    """The dims from outermost to innermost in memory; None if that is dim 0 to the last, or if a dim is expanded."""
    shape, stride, _ = meta
    wide = [dim for dim in range(len(shape)) if shape[dim] > 1]
    if any(stride[dim] == 0 for dim in wide):
        return None
    order = sorted(wide, key=lambda dim: -stride[dim])
    return tuple(order) + tuple(dim for dim in range(len(shape)) if dim not in wide) if order != wide else None


def in_memory_order(tensor: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """The tensor with its dims in memory in this order, outermost first; a copy unless they are so already."""
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return tensor.permute(order).contiguous().permute(inverse)
