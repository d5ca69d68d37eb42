"""Splits, slices and joins of an interleaved dim at the edges of its blocks, which need no communication.

A fused `[q; k; v]` projection that is sharded by heads has an interleaved last dim, `(3 64@tp)`: each rank holds a
shard of every block. Each of q, k and v then consists of blocks, too, and a rank holds its shard of them already.

The functions here are the `layout_rule`s of the ops in `slices` and `joins`. They write a dim as `([c] b)`: c blocks,
which are not sharded, of b elements each, which are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..notation.build import dims_text, join
from ..sharding.layout import Dim, Factor, Layout, divides_evenly
from .call import Call
from .kernel import FactorShard, Kernel, LocalCall, without_communication
from .views import MOVES


def _block(layout: Layout, dim: int) -> Factor | None:
    """Return the sharded factor of a dim that consists of one or more blocks, all sharded alike and evenly.

    Return None for any other dim.
    """
    *blocks, factor = layout.dims[dim]
    if len(blocks) > 1 or any(block.axes for block in blocks) or not factor.axes or not factor.size:
        return None
    return factor if divides_evenly(layout.mesh_sizes, factor) else None


def _is_interleaved(dim: Dim) -> bool:
    return len(dim) > 1


def _dim(number: str, size: int, block: Factor) -> tuple[str, str]:
    """Return the pattern of a dim that consists of blocks, and the clause that gives their number."""
    count = size // block.size
    return ("b", "") if count == 1 else (f"([{number}] b)", f"{number}={count}")


def _rule(ndim: int, dim: int, block: Factor, operand: int, results: Sequence[int], *clauses: str) -> str | None:
    """Return the rule of an op from a dim of size `operand` to dims of sizes `results`.

    Return None if one of these dims is not made of blocks.
    """
    if any(size == 0 or size % block.size for size in (operand, *results)):
        return None
    of_operand, count = _dim("c", operand, block)
    dims = [_dim(f"c{i}", size, block) for i, size in enumerate(results)]
    texts = [dims_text("x", ndim, {dim: text}) for text, _ in dims]
    sides = f"{dims_text('x', ndim, {dim: of_operand})} -> {', '.join(texts)}"
    return join(sides, *clauses, count, *(text for _, text in dims), f"b={block.size}", "kernel b")


# ---- slices and splits ----------------------------------------------------------------------------------------------


def slice_by_blocks(call: Call, layouts: Sequence[Layout]) -> str | None:
    """Return the rule: a slice of an interleaved dim that begins and ends at the edges of blocks."""
    ndim, dim = call.ndim(0), call.arg("dim") % call.ndim(0)
    block, size = _block(layouts[0], dim), call.shape(0)[dim]
    start, stop, step = slice(call.arg("start"), call.arg("end"), call.arg("step")).indices(size)
    if block is None or not _is_interleaved(layouts[0].dims[dim]) or step != 1 or start % block.size:
        return None
    return _rule(ndim, dim, block, size, [max(stop - start, 0)], MOVES)


def slice_backward_by_blocks(call: Call, layouts: Sequence[Layout]) -> str | None:
    """Return the rule: the gradient of a slice by blocks: the slice's gradient between blocks of zeros."""
    sizes = call.arg("input_sizes")
    dim = call.arg("dim") % len(sizes)
    block = _block(layouts[0], dim)
    start, _, step = slice(call.arg("start"), call.arg("end"), call.arg("step")).indices(sizes[dim])
    if block is None or step != 1 or start % block.size:
        return None
    argument = dims_text("x", len(sizes), {dim: "_"})
    return _rule(len(sizes), dim, block, call.shape(0)[dim], [sizes[dim]], "linear 0", f"input_sizes=({argument})")


def split_by_blocks(call: Call, layouts: Sequence[Layout]) -> str | None:
    """Return the rule: a split of an interleaved dim at the edges of blocks."""
    ndim, dim = call.ndim(0), call.arg("dim") % call.ndim(0)
    block, size = _block(layouts[0], dim), call.shape(0)[dim]
    if block is None or not _is_interleaved(layouts[0].dims[dim]):
        return None
    if "split_sizes" in call.arguments:
        sizes = list(call.arg("split_sizes"))
    else:
        step = call.arg("split_size")
        sizes = [min(step, size - start) for start in range(0, size, step)] if step else [0]
    return _rule(ndim, dim, block, size, sizes, MOVES)


@without_communication
def _slice(call: LocalCall, shard: FactorShard) -> Tensor:
    """Return the shards that this rank holds of the blocks of a slice."""
    dim = call.sharded_dim
    start = slice(call["start"], None).indices(call.given[0].shape[dim])[0] // shard.size * shard.held
    rows: Tensor = call["self"].narrow(dim, start, call.local_shape()[dim])
    return rows.clone(memory_format=torch.contiguous_format)


@without_communication
def _slice_backward(call: LocalCall, shard: FactorShard) -> Tensor:
    """Write the gradient of such a slice into zeros, at the blocks that were sliced."""
    dim, gradient = call.sharded_dim, call["grad_output"]
    start = slice(call["start"], None).indices(call.shapes[0][dim])[0] // shard.size * shard.held
    result = call.zeros(gradient)
    result.narrow(dim, start, gradient.shape[dim]).copy_(gradient)
    return result


@without_communication
def _split(call: LocalCall, shard: FactorShard) -> list[Tensor]:
    """Split the local shard at the edges of its blocks."""
    dim = call.sharded_dim
    parts = call["self"].split([layout.local_shape(call.at)[dim] for layout in call.layouts], dim)
    return [part.clone(memory_format=torch.contiguous_format) for part in parts]


SLICE = {"b": Kernel(_slice, rounds=0, traffic=0.0)}
SLICE_BACKWARD = {"b": Kernel(_slice_backward, rounds=0, traffic=0.0)}
SPLIT = {"b": Kernel(_split, rounds=0, traffic=0.0)}

# ---- joins ----------------------------------------------------------------------------------------------------------


def cat_by_blocks(call: Call, layouts: Sequence[Layout]) -> str | None:
    """Return the rule: tensors of blocks of one size, joined: each rank joins its local shards."""
    tensors = call.tensors[0]
    ndim = len(tensors[0].shape)
    dim = call.arg("dim") % ndim
    if any(len(tensor.shape) != ndim or tensor.shape[dim] == 0 for tensor in tensors):
        return None
    blocks = {_block(layout, dim) for layout in layouts}
    block = blocks.pop()
    if block is None or blocks or len(tensors) < 2:
        return None
    total = sum(tensor.shape[dim] for tensor in tensors)
    operand = "b" if all(tensor.shape[dim] == block.size for tensor in tensors) else "([m] b)"
    sides = f"{{{dims_text('x', ndim, {dim: operand})}}} -> {dims_text('x', ndim, {dim: '([c] b)'})}"
    return join(sides, MOVES, f"c={total // block.size}", f"b={block.size}", "ragged")
