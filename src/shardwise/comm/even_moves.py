"""Moves between evenly sharded layouts: reshapes around one native collective."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._torch.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from ..sharding.layout import Coordinate
from ..sharding.mesh import MeshInfo
from .move import Move, group_of_step
from .on_ranks import LocalOp, on_ranks
from .packing import as_bytes
from .plan import Step
from .states import DistState, common_slots
from .transport import (
    divided_sum,
    from_wire,
    moves_natively,
    needs_no_conversion,
    reduce_locally,
    reduces_natively,
    to_wire,
    wire_op,
)


def all_gather_move(step: Step, mesh_info: MeshInfo, dtype: torch.dtype) -> Move:
    """Return the move that gathers the shards over one or more axes."""
    name, ranks = group_of_step(step, mesh_info)
    sides = _over_slots(step)
    arrange = _grouped_to_local(step, sides)
    if moves_natively(dtype):
        in_place = _gathers_in_place(step, sides)
        return Move(lambda local: all_gather(local.contiguous(), ranks, name), True, None if in_place else arrange)
    return Move(
        lambda local: all_gather(as_bytes(local), ranks, name),
        True,
        lambda received: arrange(received.view(dtype)),
    )


def all_to_all_move(step: Step, mesh_info: MeshInfo, dtype: torch.dtype) -> Move:
    """Return the move that takes axes from one dim, which they shard, to another."""
    name, ranks = group_of_step(step, mesh_info)
    sides = _over_slots(step)
    pack, arrange = _local_to_grouped(step, sides), _grouped_to_local(step, sides)
    piece = math.prod(sides.local_before) // ranks
    if moves_natively(dtype):
        splits = [piece] * ranks
        return Move(lambda local: all_to_all(pack(local), splits, splits, name), True, arrange)
    splits = [piece * dtype.itemsize] * ranks
    return Move(
        lambda local: all_to_all(as_bytes(pack(local)), splits, splits, name),
        True,
        lambda received: arrange(received.view(dtype)),
    )


def reduce_scatter_move(step: Step, mesh_info: MeshInfo, dtype: torch.dtype) -> Move:
    """Return the move that reduces over Partial axes and shards a dim over them."""
    name, ranks = group_of_step(step, mesh_info)
    pack = pack_for_scatter(step)
    scale, divide = divided_sum(step.divisor, dtype)
    op, shape = wire_op(dtype, step.op), step.after.local_shape((0,) * len(mesh_info.sizes))
    return Move(
        lambda local: reduce_scatter(to_wire(scale(pack(local)), step.op), op, ranks, name),
        True,
        lambda received: divide(from_wire(received, dtype, step.op)).view(shape),
    )


def pack_for_scatter(step: Step) -> LocalOp:
    """Return the function that packs a local tensor for an even reduce-scatter: a piece for each rank, as a vector."""
    return _local_to_grouped(step, _over_slots(step))


def all_reduce_move(step: Step, mesh_info: MeshInfo, dtype: torch.dtype) -> Move:
    """Return the move that reduces over Partial axes. Shards may be uneven."""
    name, ranks = group_of_step(step, mesh_info)
    if reduces_natively(dtype, step.op):
        op = wire_op(dtype, step.op)
        if needs_no_conversion(dtype, step.op) and step.divisor == 1:
            return Move(lambda local: all_reduce(local.contiguous(), op, name), True, None, copies=True)
        scale, divide = divided_sum(step.divisor, dtype)
        return Move(
            lambda local: all_reduce(to_wire(scale(local.contiguous()), step.op), op, name),
            True,
            lambda received: divide(from_wire(received, dtype, step.op)),
            copies=True,
        )

    def reduce(at: Coordinate, received: Tensor) -> Tensor:
        return reduce_locally(received.view(dtype).view(ranks, *step.after.local_shape(at)), step.op, step.divisor)

    return Move(lambda local: all_gather(as_bytes(local), ranks, name), True, on_ranks(mesh_info, reduce))


# ---- reshapes -------------------------------------------------------------------------------------------------------


class _Sides(NamedTuple):
    """The states before and after a step over common slots, and the local size of each slot in them."""

    before: DistState
    after: DistState
    local_before: tuple[int, ...]
    local_after: tuple[int, ...]


def _over_slots(step: Step) -> _Sides:
    slots = common_slots(step.before, step.after)
    assert slots is not None, "the planner makes such steps over common slots only"
    sizes = [size for dim in slots.sizes for size in dim]
    mesh_sizes = step.before.mesh_sizes

    def local_sizes(state: DistState) -> tuple[int, ...]:
        shards = [math.prod(mesh_sizes[axis] for axis in axes) for axes in state.slots]
        return tuple(size // count for size, count in zip(sizes, shards, strict=True))

    return _Sides(slots.source, slots.target, local_sizes(slots.source), local_sizes(slots.target))


def _grouped_to_local(step: Step, sides: _Sides) -> LocalOp:
    """Return the function from the pieces of a group's ranks, stacked in group order, to the local tensor."""
    mesh_sizes, shape = step.before.mesh_sizes, step.after.local_shape((0,) * len(step.before.mesh_sizes))
    pieces = tuple(min(a, b) for a, b in zip(sides.local_before, sides.local_after, strict=True))
    stacked = [mesh_sizes[axis] for axis in step.axes] + list(pieces)
    order: list[int] = []
    for slot, (axes_before, axes_after) in enumerate(zip(sides.before.slots, sides.after.slots, strict=True)):
        gathered = axes_before[len(axes_after) :]
        order += [step.axes.index(axis) for axis in gathered] + [len(step.axes) + slot]
    if _order_is_trivial(stacked, order):
        return lambda grouped: grouped.view(shape)
    # Not `reshape`, which may return a view that is not row-major.
    return lambda grouped: grouped.view(stacked).permute(order).contiguous().view(shape)


def _gathers_in_place(step: Step, sides: _Sides) -> bool:
    """Return whether the gathered pieces in a row are the result: shards of the first dim, in group order."""
    gathered = sides.before.slots[0][len(sides.after.slots[0]) :]
    return gathered == step.axes and len(step.after.dims[0]) == 1 == len(step.before.dims[0])


def _local_to_grouped(step: Step, sides: _Sides) -> LocalOp:
    """Return the function from the local tensor to a piece for each rank of the group, as a vector in group order."""
    mesh_sizes = step.before.mesh_sizes
    pieces = tuple(min(a, b) for a, b in zip(sides.local_before, sides.local_after, strict=True))
    split: list[int] = []
    piece_at, axis_at = [], {}
    for axes_before, axes_after, piece in zip(sides.before.slots, sides.after.slots, pieces, strict=True):
        for axis in axes_after[len(axes_before) :]:
            axis_at[axis] = len(split)
            split.append(mesh_sizes[axis])
        piece_at.append(len(split))
        split.append(piece)
    order = [axis_at[axis] for axis in step.axes] + piece_at
    if _order_is_trivial(split, order):
        return lambda local: local.contiguous().view(-1)
    return lambda local: local.reshape(split).permute(order).reshape(-1)


def _order_is_trivial(sizes: Sequence[int], order: Sequence[int]) -> bool:
    """Return whether a permutation moves only dims of size 1."""
    moved = [index for index in order if sizes[index] != 1]
    return moved == sorted(moved)
