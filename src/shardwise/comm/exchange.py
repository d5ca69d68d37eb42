"""Moves between any two layouts by one all-to-all, and scatter and broadcast from one rank."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._torch.collectives import all_gather, all_to_all, broadcast, wait
from ..sharding.layout import Coordinate, Layout
from ..sharding.mesh import MeshInfo
from .boxes import Box, Schedule, intersection, schedule, schedule_bytes, volume
from .move import Move, group_of_step
from .on_ranks import LocalOp, on_ranks, split_sizes
from .packing import as_bytes, pack_boxes, unpack_boxes
from .plan import Step
from .transport import moves_natively, reduce_locally


def exchange_move(step: Step, mesh_info: MeshInfo, dtype: torch.dtype) -> Move:
    """Return the move by one all-to-all in which each rank sends each peer the elements that the peer needs.

    If the step reduces, each rank receives the operands of all peers and reduces them itself.
    """
    name, ranks = group_of_step(step, mesh_info)
    schedules: dict[Coordinate, Schedule] = {}

    def schedule_at(at: Coordinate) -> Schedule:
        found = schedules.get(at)
        if found is None:
            found = schedules[at] = schedule(step.before, step.after, at, step.axes)
        return found

    native = moves_natively(dtype)
    unit = 1 if native else dtype.itemsize
    outgoing = split_sizes(mesh_info, ranks, lambda at: [unit * size for size in schedule_at(at).send_sizes])
    incoming = split_sizes(mesh_info, ranks, lambda at: [unit * size for size in schedule_at(at).receive_sizes])

    def pack(at: Coordinate, local: Tensor) -> Tensor:
        flat = pack_boxes(local, schedule_at(at).send)
        return flat if native else as_bytes(flat)

    def unpack(at: Coordinate, received: Tensor) -> Tensor:
        received = received if native else received.view(dtype)
        shape = step.after.local_shape(at)
        if step.op:
            # Every peer sends its operand of the same boxes, one after the other.
            sent = zip(received.view(ranks, -1), schedule_at(at).receive, strict=True)
            operands = [unpack_boxes(operand, [boxes], shape) for operand, boxes in sent]
            return reduce_locally(torch.stack(operands), step.op, step.divisor)
        return unpack_boxes(received, schedule_at(at).receive, shape)

    packed, unpacked = on_ranks(mesh_info, pack), on_ranks(mesh_info, unpack)
    nbytes = sum(map(schedule_bytes, schedules.values()))
    return Move(lambda local: all_to_all(packed(local), incoming, outgoing, name), True, unpacked, nbytes)


# ---- from a source rank ---------------------------------------------------------------------------------------------


def scatter_move(
    before: Layout, after: Layout, axis: int, source: int, mesh_info: MeshInfo, dtype: torch.dtype
) -> LocalOp:
    """Return a function by which the rank at index `source` of an axis sends each rank along the axis its shard.

    The axis shards the tensor in `after`, not in `before`. The local tensors of other ranks are not read.
    """
    name, ranks = mesh_info.groups[(axis,)], mesh_info.sizes[axis]
    native = moves_natively(dtype)
    unit = 1 if native else dtype.itemsize

    def boxes_for(at: Coordinate, index: int) -> tuple[Box, ...]:
        peer = (*at[:axis], index, *at[axis + 1 :])
        return intersection(before.runs(peer), after.runs(peer))

    def outgoing(at: Coordinate) -> list[int]:
        if at[axis] != source:
            return [0] * ranks
        return [unit * volume(boxes_for(at, index)) for index in range(ranks)]

    def incoming(at: Coordinate) -> list[int]:
        size = unit * math.prod(after.local_shape(at))
        return [size if index == source else 0 for index in range(ranks)]

    def pack(at: Coordinate, local: Tensor) -> Tensor:
        boxes = [boxes_for(at, index) for index in range(ranks)] if at[axis] == source else []
        flat = pack_boxes(local, boxes)
        return flat if native else as_bytes(flat)

    def unpack(at: Coordinate, received: Tensor) -> Tensor:
        received = received if native else received.view(dtype)
        return unpack_boxes(received, [boxes_for(at, at[axis])], after.local_shape(at))

    packed, unpacked = on_ranks(mesh_info, pack), on_ranks(mesh_info, unpack)
    into, out = split_sizes(mesh_info, ranks, incoming), split_sizes(mesh_info, ranks, outgoing)
    return lambda local: unpacked(wait(all_to_all(packed(local), into, out, name)))


def broadcast_move(axis: int, source: int, mesh_info: MeshInfo, dtype: torch.dtype) -> LocalOp:
    """Return a function by which the rank at index `source` of an axis sends its local tensor to the others."""
    name = mesh_info.groups[(axis,)]
    if moves_natively(dtype):
        return lambda local: wait(broadcast(local.contiguous(), source, name))
    return lambda local: wait(broadcast(as_bytes(local), source, name)).view(dtype).view(local.shape)


def all_gather_ranks(message: Tensor, mesh_info: MeshInfo) -> Tensor:
    """Gather a vector, as long on every rank, from the ranks of the mesh: one row for each, in mesh order."""
    table = message.view(1, -1)
    for axis in reversed(range(len(mesh_info.sizes))):
        if mesh_info.sizes[axis] > 1:
            table = wait(all_gather(table, mesh_info.sizes[axis], mesh_info.groups[(axis,)]))
    return table
