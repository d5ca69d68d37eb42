"""Moves without communication: a rank keeps a slice of its shard, or makes an axis Partial."""

from __future__ import annotations

import torch
from torch import Tensor

from ..sharding.cache import cached_within
from ..sharding.layout import Coordinate, Layout
from .boxes import Box, intersection
from .packing import received_box, sent_box
from .plan import Step
from .transport import identity


@cached_within(16 << 20, lambda boxes: 200 * sum(map(len, boxes)))
def _overlap(before: Layout, after: Layout, at: Coordinate) -> tuple[Box, ...]:
    return intersection(before.runs(at), after.runs(at))


def take_slice(local: Tensor, before: Layout, after: Layout, at: Coordinate) -> Tensor:
    """Return a copy of the local shard of `after`, which the local shard of `before` contains."""
    boxes = _overlap(before, after, at)
    if len(boxes) == 1:
        return sent_box(local, boxes[0]).clone(memory_format=torch.contiguous_format)
    result = local.new_empty(after.local_shape(at))
    for box in boxes:
        received_box(result, box).copy_(sent_box(local, box))
    return result


def make_partial(step: Step, at: Coordinate, local: Tensor) -> Tensor:
    """Return this rank's operand of a reduction over an axis that was replicated or sharded.

    A sum or product of a replicated value keeps it at index 0 and takes the identity elsewhere; an average, max or min
    keeps it everywhere. A shard is surrounded by the identity, and scaled if the reduction is an average.
    """
    ((axis, op),) = set(step.after.partial) - set(step.before.partial)
    fill = identity(local.dtype, op)
    if step.before.dims == step.after.dims:
        if at[axis] == 0 or op in ("avg", "max", "min"):
            return local.clone(memory_format=torch.contiguous_format)
        return torch.full_like(local, fill, memory_format=torch.contiguous_format)
    result = local.new_full(step.after.local_shape(at), fill)
    for box in _overlap(step.before, step.after, at):
        shard = sent_box(local, box)
        if op == "avg":
            # float8 has no arithmetic
            shard = (shard.float() if shard.dtype.itemsize == 1 else shard) * step.before.mesh_sizes[axis]
        received_box(result, box).copy_(shard)
    return result
