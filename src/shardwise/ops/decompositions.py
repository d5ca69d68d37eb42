"""Ops that are cheaply expressed by others: a short list, after the rules and before running whole.

PyTorch has decompositions for hundreds of ops, but in eager most are many times slower than the op. Those listed here
cost about what the op costs. `INSTEAD` holds further ones, next to the kernels they are made of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch.ops import OpOverload
from ..notation.schema import overload_key, packet_name, variant_of
from .op import Op
from .registry import registry
from .tables import INSTEAD

aten = torch.ops.aten

FROM_PYTORCH = (
    "aten::_unsafe_masked_index.default",  # index, where
    "aten::_unsafe_masked_index_put_accumulate.default",  # masked_fill, index_put
    "aten::channel_shuffle.default",  # view, transpose, view
    "aten::_euclidean_dist.default",  # cat, matmul
)
"""Ops that are taken apart as PyTorch's own table of decompositions says."""


def _pytorch(name: str) -> Callable[..., Any]:
    def decomposed(*args: Any, **kwargs: Any) -> Any:
        from torch._decomp import decomposition_table

        return decomposition_table[_overload(name)](*args, **kwargs)

    return decomposed


def _overload(name: str) -> OpOverload:
    packet, _, overload = name.removeprefix("aten::").partition(".")
    found: OpOverload = getattr(getattr(aten, packet), overload)
    return found


def _without_empty(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    """A join whose list has empty vectors among tensors of other ranks, which count for nothing, by an old custom."""
    kept = [tensor for tensor in tensors if tuple(tensor.shape) != (0,)]
    return aten.cat(kept, dim) if 0 < len(kept) < len(tensors) else NotImplemented


def _block_diagonal(tensors: Sequence[Tensor]) -> Tensor:
    """Matrices along a diagonal: each with zeros left and right of it, one below the other."""
    blocks = [tensor if tensor.dim() == 2 else tensor.view(1, -1) for tensor in tensors]
    total, rows, left = sum(block.shape[1] for block in blocks), [], 0
    for block in blocks:
        rows.append(aten.constant_pad_nd(block, [left, total - left - block.shape[1]]))
        left += block.shape[1]
    joined: Tensor = aten.cat(rows)
    return joined


def _renormed_rows(table: Tensor, rows: Tensor, max_norm: float, norm_type: float) -> Tensor:
    """Rows of a table that are looked up are made no longer than a limit, in place."""
    length = aten.linalg_vector_norm(table, norm_type, [1], True)
    used = torch.zeros_like(length).index_fill(0, rows.flatten(), 1.0) > 0
    scale = torch.where(used & (length > max_norm), max_norm / (length + 1e-7), 1.0)
    return table.mul_(scale)


def _least_squares(a: Tensor, b: Tensor, rcond: float | None = None, *, driver: str | None = None) -> Any:
    """The solution by singular values where PyTorch pivots: its pivots start from memory that nobody has written.

    So the last bits of the solution differ from call to call, and from rank to rank.
    """
    if a.device.type != "cpu" or driver not in (None, "gelsy"):
        return NotImplemented
    solution, residuals, rank, values = aten.linalg_lstsq(a, b, rcond, driver="gelsd")
    return solution, residuals.new_empty(0), rank, values.new_empty(0)


INSTEAD.update(
    {
        **{name: _pytorch(name) for name in FROM_PYTORCH},
        "aten::block_diag.default": _block_diagonal,
        "aten::cat.default": _without_empty,
        "aten::embedding_renorm_.default": _renormed_rows,
        "aten::linalg_lstsq.default": _least_squares,
    }
)


def _copied_view(func: OpOverload) -> Op | None:
    """`view_copy` and its like: the view, copied."""
    name = packet_name(func)
    if not name.endswith("_copy") or variant_of(func) != "functional":
        return None
    packet = getattr(aten, name.removeprefix("aten::").removesuffix("_copy"), None)
    view = getattr(packet, func._overloadname, None)
    if view is None or [a.name for a in view._schema.arguments] != [a.name for a in func._schema.arguments]:
        return None

    def copied(*args: Any, **kwargs: Any) -> Any:
        result = view(*args, **kwargs)
        return result.clone() if isinstance(result, Tensor) else [piece.clone() for piece in result]

    return Op(overload_key(func), decomposition=copied, file="ops/decompositions.py")


registry.add_pattern(_copied_view)
