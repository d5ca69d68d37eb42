"""The memory order of a tensor: its strides, and its dims from outermost to innermost."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from .._torch.symbols import has_symbols, symbolic


class TensorMeta(NamedTuple):
    """Shape, stride and dtype of a global tensor.

    >>> distribute_tensor(torch.zeros(2, 3), mesh, P("dp")).spec.tensor_meta
    TensorMeta(shape=torch.Size([2, 3]), stride=(3, 1), dtype=torch.float32)
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


def meta_of(tensor: torch.Tensor) -> TensorMeta:
    """Return the shape, strides and dtype of a tensor, with the compiler's symbolic sizes made hashable."""
    shape, stride = tensor.shape, tensor.stride()
    if has_symbols((*shape, *stride)):
        shape, stride = symbolic(shape), symbolic(stride)
    return TensorMeta(shape, stride, tensor.dtype)


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a row-major tensor of this shape."""
    try:
        return _cached_stride(tuple(shape))
    except TypeError:  # PyTorch's own symbols have no hash
        return _contiguous_stride(shape)


def _contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


_cached_stride = lru_cache(4096)(_contiguous_stride)


def contiguous_meta(shape: Sequence[int], dtype: torch.dtype) -> TensorMeta:
    """Return the `TensorMeta` of a row-major tensor."""
    return TensorMeta(torch.Size(shape), contiguous_stride(shape), dtype)


def is_dense(meta: TensorMeta) -> bool:
    """Return whether the elements of a tensor fill its memory without gaps or overlaps, in any order of dims."""
    expected = 1
    for stride, size in sorted(
        (stride, size) for size, stride in zip(meta.shape, meta.stride, strict=True) if size > 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True


def overlaps(meta: TensorMeta) -> bool:
    """Return whether elements of a tensor may share memory, as those of an expanded one do."""
    end = 0
    for stride, size in sorted(zip(meta.stride, meta.shape, strict=True)):
        if size > 1:
            if stride <= end:
                return True
            end += stride * (size - 1)
    return False


class MemoryOrder(NamedTuple):
    """The dims of a tensor from outermost to innermost in memory, and those that are expanded, with a stride of 0."""

    dims: tuple[int, ...]
    expanded: tuple[int, ...]


def memory_order(meta: TensorMeta) -> MemoryOrder | None:
    """Return the order of a tensor's dims in memory; None if that is dim 0 to the last, and no dim is expanded."""
    shape, stride, _ = meta
    wide = [dim for dim in range(len(shape)) if shape[dim] > 1]
    expanded = tuple(dim for dim in wide if stride[dim] == 0)
    order = sorted((dim for dim in wide if stride[dim]), key=lambda dim: -stride[dim])
    if order == wide:
        return None
    return MemoryOrder(tuple(order) + tuple(dim for dim in range(len(shape)) if dim not in order), expanded)


def in_memory_order(tensor: torch.Tensor, order: MemoryOrder | None) -> torch.Tensor:
    """Return the tensor with its dims in this order in memory (None: row-major); a copy unless it has that order."""
    if order is None:
        return tensor.contiguous()
    dims, expanded = order
    inverse = sorted(range(len(dims)), key=dims.__getitem__)
    found = tensor
    for dim in expanded:
        found = found.narrow(dim, 0, min(1, found.shape[dim]))
    found = found.permute(dims).contiguous().permute(inverse)
    return found.expand(tensor.shape) if expanded else found


def has_memory_order_of(local: torch.Tensor, meta: TensorMeta) -> bool:
    """Return whether a local shard has the memory order of the global tensor.

    Then the views that are legal for the global tensor are legal for the shard, with the same meaning: dims have the
    same order, neighbours without a gap between them have none in the shard, and the same dims are expanded.
    """
    if local.numel() == 0:
        return True
    shape, stride, _ = meta
    if local.is_contiguous() and stride == contiguous_stride(shape):
        return True
    sizes, steps = local.shape, local.stride()
    wide = [dim for dim in range(len(shape)) if shape[dim] > 1]
    if any((stride[dim] == 0) != (steps[dim] == 0) for dim in wide if sizes[dim] > 1):
        return False
    inside = least = 1  # the stride that the next dim would have in the global tensor, and in the shard, without a gap
    exact = True  # False after a gap at a dim of local size 1, whose stride in the shard means nothing
    for dim in sorted((dim for dim in wide if stride[dim]), key=lambda dim: (stride[dim], -dim)):
        packed, overlaps = stride[dim] == inside, stride[dim] < inside
        inside = stride[dim] * shape[dim]
        if sizes[dim] > 1:
            if steps[dim] != least if packed and exact else not overlaps and steps[dim] < least:
                return False
            least, exact = steps[dim], True
        else:
            exact = exact and packed
            least = 1 if overlaps else least  # this dim is in the gaps of inner dims, and outer ones may be
        least *= sizes[dim]
    return True
