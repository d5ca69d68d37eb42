"""Joins of tensors along an existing dim or a new one, and repeated tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..notation.build import dims_text, join
from .blocks import cat_by_blocks
from .call import Call
from .kernel import FactorShard, Fetch, Kernel, KernelRun, LocalCall
from .registry import definitions_in
from .slices import starts_of
from .views import MOVES

aten = torch.ops.aten
define = definitions_in(__name__)

# ---- along a dim ----------------------------------------------------------------------------------------------------


def cat_rule(call: Call) -> str | None:
    """Return the rule: tensors joined along a dim, each sharded by its own size."""
    ndims = {len(tensor.shape) for tensor in call.tensors[0]}
    if len(ndims) > 1:
        return None  # see `without_empty`
    ndim = ndims.pop()
    text = dims_text("x", ndim, {call.arg("dim") % ndim: "k"})
    return join(f"{{{text}}} -> {text}", MOVES, "kernel k")


def cat(call: LocalCall, shard: FactorShard) -> KernelRun:
    """Join the local shards of all operands, then exchange rows so that the result is sharded evenly."""
    dim = call.sharded_dim
    sizes = [layout.shape[dim] for layout in call.given]
    starts = starts_of(sizes)
    held = [
        [(start + low, start + high) for start, (low, high) in zip(starts, bounds, strict=True)]
        for bounds in zip(*(shard.of(size).bounds for size in sizes), strict=True)
    ]
    return (yield Fetch(torch.cat(call["tensors"], dim), dim, held, shard.of(sum(sizes)).bounds))


def without_empty(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Run `cat` without the empty vectors of its list, which PyTorch allows among tensors of other ranks."""
    kept = [tensor for tensor in tensors if tuple(tensor.shape) != (0,)]
    return aten.cat(kept, dim) if 0 < len(kept) < len(tensors) else NotImplemented


def block_diagonal(tensors: Sequence[Tensor]) -> Tensor:
    """Return matrices along a diagonal: each with zeros left and right of it, one below the other."""
    for index, tensor in enumerate(tensors):
        if tensor.dim() > 2:
            raise RuntimeError(f"block_diag takes tensors of at most 2 dims; number {index} has {tensor.dim()}")
    blocks = [tensor if tensor.dim() == 2 else tensor.view(1, -1) for tensor in tensors]
    total, rows, left = sum(block.shape[1] for block in blocks), [], 0
    for block in blocks:
        rows.append(aten.constant_pad_nd(block, [left, total - left - block.shape[1]]))
        left += block.shape[1]
    joined: Tensor = aten.cat(rows)
    return joined


define(
    "aten::cat",
    cat_rule,
    layout_rule=cat_by_blocks,
    kernels={"k": Kernel(cat)},
    decomposition=without_empty,
)
define("aten::block_diag", decomposition=block_diagonal)

# ---- along a new dim ------------------------------------------------------------------------------------------------


def stack(call: Call) -> str:
    """Return the rule: a list joined along a new dim: each rank joins its local shards."""
    ndim = len(call.tensors[0][0].shape)
    names = [f"x{dim}" for dim in range(ndim)]
    at = call.arg("dim") % (ndim + 1)
    return join(f"{{{' '.join(names)}}} -> {' '.join((*names[:at], '_', *names[at:]))}", MOVES)


def repeat(call: Call) -> str:
    """Return the rule: copies of a dim, one after the other: a sharded dim becomes an interleaved one of the result."""
    repeats, ndim = list(call.arg("repeats")), call.ndim(0)
    new = len(repeats) - ndim
    result = ["_"] * new
    sizes = []
    for dim, times in enumerate(repeats[new:]):
        result.append(f"x{dim}" if times == 1 else f"([r{dim}] x{dim})" if times else "_")
        sizes += [f"r{dim}={times}"] if times > 1 else []
    operand = dims_text("x", ndim, {dim: "_" for dim, times in enumerate(repeats[new:]) if times == 0})
    return join(f"{operand} -> {' '.join(result)}", MOVES, *sizes)


define("aten::stack", stack)
define("aten::repeat", repeat, derivative_makes_tensors=True)  # the gradient of zero copies is zeros
define("aten::combinations", makes_tensors=True)
