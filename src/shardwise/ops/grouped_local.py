"""Grouped matrix products of plain tensors of any sizes and dtypes, which ranks compute on their local shards."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..sharding.layout import Run

_ALIGNMENT = 16  # bytes: PyTorch's op takes matrices whose rows begin at multiples of it
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def grouped_mm(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Return the product of each group's rows with its matrix. Rows after the last group are zero."""
    result = rows.new_zeros((rows.shape[0], matrices.shape[2]))
    if result.is_meta or 0 in (*rows.shape, *matrices.shape):
        return result
    if rows.dtype not in _DTYPES:
        for group, (start, stop) in enumerate(_bounds(ends)):
            result[start:stop] = rows[start:stop] @ matrices[group]
        return result
    product = torch.nn.functional.grouped_mm(_padded(rows, 1), _padded(matrices, 1, 2), offs=ends.int())
    computed = torch.arange(rows.shape[0], device=rows.device) < ends[-1]
    return torch.where(computed[:, None], product[:, : matrices.shape[2]], result)


def grouped_outer(left: Tensor, right: Tensor, ends: Tensor, like: Tensor | None = None) -> Tensor:
    """Return for each group the product of the columns of `left` with the rows of `right` that belong to it.

    `like`, the matrices whose gradient this is, is not read: its sharding determines which groups to compute.
    """
    result = left.new_zeros((ends.shape[0], left.shape[0], right.shape[1]))
    if result.is_meta or 0 in (*left.shape, *right.shape, *ends.shape):
        return result
    if left.dtype not in _DTYPES:
        for group, (start, stop) in enumerate(_bounds(ends)):
            result[group] = left[:, start:stop] @ right[start:stop]
        return result
    columns = _padded(left.t(), 1).t()
    product = torch.nn.functional.grouped_mm(columns, _padded(right, 1), offs=ends.int())
    return product[:, : left.shape[0], : right.shape[1]].contiguous()


def _bounds(ends: Tensor) -> list[Run]:
    stops = ends.tolist()
    return list(zip([0, *stops[:-1]], stops, strict=True))


def _padded(tensor: Tensor, *dims: int) -> Tensor:
    """Return the tensor, with these dims padded by zeros or copied if needed, so that its rows are aligned."""
    unit = _ALIGNMENT // tensor.dtype.itemsize
    missing = [-tensor.shape[dim] % unit if dim in dims else 0 for dim in range(tensor.dim())]
    if any(missing):
        return torch.nn.functional.pad(tensor, [n for size in reversed(missing) for n in (0, size)])
    matrix = tensor.stride()[-2:]
    aligned = 1 in matrix and max(matrix) % unit == 0 and max(matrix) >= max(tensor.shape[-1], 1)
    return (
        tensor
        if aligned and tensor.data_ptr() % _ALIGNMENT == 0
        else tensor.clone(memory_format=torch.contiguous_format)
    )


def local_ends(ends: Tensor, held: Sequence[Run]) -> Tensor:
    """Return where groups end among the rows that a rank holds, given where they end among all rows."""
    counts = [ends.clamp(start, stop) - start for start, stop in held]
    return torch.stack(counts).sum(0).to(ends.dtype) if counts else torch.zeros_like(ends)
