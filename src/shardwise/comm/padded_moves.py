"""Moves between unevenly sharded layouts by one native collective, on pieces that are padded to one size.

A piece is the elements of a local shard in a row, followed by zeros. Shards follow `torch.chunk`: full ones, then a
shorter one, then empty ones. So along the first dim all zeros come last, and the gathered tensor is a view of what was
received; along other dims one copy puts the pieces together.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .._torch.collectives import all_gather, reduce_scatter
from ..sharding.layout import Coordinate, Layout
from ..sharding.mesh import MeshInfo
from .boxes import Box, boxes_bytes, intersection, members
from .move import Move, group_of_step
from .on_ranks import on_ranks
from .packing import as_bytes, received_box, sent_box
from .plan import Step
from .transport import divided_sum, from_wire, moves_natively, to_wire, wire_op


def padded_all_gather_move(step: Step, mesh_info: MeshInfo, dtype: torch.dtype) -> Move:
    """Return the move that gathers the shards over one or more axes."""
    name, ranks = group_of_step(step, mesh_info)
    stacks = _stacks(step.before, step.after, step, mesh_info)
    native = moves_natively(dtype)

    def pack(at: Coordinate, local: Tensor) -> Tensor:
        piece = padded(local, stacks[at].length)
        return piece if native else as_bytes(piece)

    def unpack(at: Coordinate, received: Tensor) -> Tensor:
        return stacks[at].join(received if native else received.view(dtype))

    packed, unpacked = on_ranks(mesh_info, pack), on_ranks(mesh_info, unpack)
    return Move(lambda local: all_gather(packed(local), ranks, name), True, unpacked, _nbytes(stacks))


def padded_reduce_scatter_move(step: Step, mesh_info: MeshInfo, dtype: torch.dtype) -> Move:
    """Return the move that reduces over Partial axes and shards a dim over them."""
    name, ranks = group_of_step(step, mesh_info)
    stacks = _stacks(step.after, step.before, step, mesh_info)
    op, (scale, divide) = wire_op(dtype, step.op), divided_sum(step.divisor, dtype)

    def pack(at: Coordinate, local: Tensor) -> Tensor:
        return to_wire(scale(stacks[at].split(local)), step.op)

    def unpack(at: Coordinate, received: Tensor) -> Tensor:
        shape = step.after.local_shape(at)
        return divide(from_wire(received, dtype, step.op))[: math.prod(shape)].view(shape)

    packed, unpacked = on_ranks(mesh_info, pack), on_ranks(mesh_info, unpack)
    return Move(lambda local: reduce_scatter(packed(local), op, ranks, name), True, unpacked, _nbytes(stacks))


def padded(local: Tensor, length: int) -> Tensor:
    """Return the elements of a tensor as a vector of this length, padded with zeros at the end.

    A copy only if zeros are added or the tensor is not contiguous.
    """
    count = local.numel()
    if count == length:
        return local.contiguous().view(-1)
    # Zeros, because tools that look for NaNs also look at what is sent.
    result = local.new_empty(length)
    result[:count].view(local.shape).copy_(local)
    result[count:].zero_()
    return result


# ---- pieces in a vector ----------------------------------------------------------------------------------------------


class Stack(NamedTuple):
    """How a vector of pieces, one of `length` elements for each rank of a group, makes up a tensor of this `shape`.

    Without its zeros, piece `i` has the shape `shapes[i]`; `boxes[i]` are its places in the piece and in the tensor.
    If pieces can be concatenated along a dim, `dim` is that dim and `order` the order. `in_place` means that the vector
    begins with the elements of the tensor.
    """

    shape: tuple[int, ...]
    length: int
    shapes: tuple[tuple[int, ...], ...]
    boxes: tuple[tuple[Box, ...], ...]
    dim: int | None
    order: tuple[int, ...]
    in_place: bool

    def join(self, vector: Tensor) -> Tensor:
        """Return the tensor that the pieces in a vector make up: a view of the vector if in place, else one copy."""
        if self.in_place:
            return vector[: math.prod(self.shape)].view(self.shape)
        if self.dim is not None:
            return torch.cat([self._piece(vector, index) for index in self.order], self.dim)
        result = vector.new_empty(self.shape)
        for index in self.order:
            piece = self._piece(vector, index)
            for box in self.boxes[index]:
                received_box(result, box).copy_(sent_box(piece, box))
        return result

    def split(self, tensor: Tensor) -> Tensor:
        """Return the vector of the pieces of a tensor. A copy, unless pieces are in place and nothing is padded."""
        if self.in_place:
            return padded(tensor, self.length * len(self.shapes))
        vector = tensor.new_empty(self.length * len(self.shapes))
        for index, (shape, boxes) in enumerate(zip(self.shapes, self.boxes, strict=True)):
            piece = self._piece(vector, index)
            for box in boxes:
                sent_box(piece, box).copy_(received_box(tensor, box))
            if math.prod(shape) < self.length:
                vector[index * self.length + math.prod(shape) : (index + 1) * self.length].zero_()
        return vector

    def _piece(self, vector: Tensor, index: int) -> Tensor:
        start, shape = index * self.length, self.shapes[index]
        return vector[start : start + math.prod(shape)].view(shape)


def _stacks(pieces: Layout, joined: Layout, step: Step, mesh_info: MeshInfo) -> dict[Coordinate, Stack]:
    """Return the stack of each rank that this process runs, by coordinate.

    Shards of the layout `pieces` over the step's axes make up a shard of the layout `joined`.
    """
    coordinates = mesh_info.coordinates if mesh_info.simulated else [mesh_info.coordinate]
    return {at: _stack(pieces, joined, members(pieces.mesh_sizes, at, step.axes), at) for at in coordinates}


def _stack(pieces: Layout, joined: Layout, peers: list[Coordinate], at: Coordinate) -> Stack:
    shape, shapes = joined.local_shape(at), tuple(map(pieces.local_shape, peers))
    runs = joined.runs(at)
    boxes = tuple(intersection(pieces.runs(peer), runs) for peer in peers)
    length = max(map(math.prod, shapes))
    filled = [index for index, its_boxes in enumerate(boxes) if its_boxes]
    dim, order = None, filled
    if all(len(boxes[index]) == 1 for index in filled):
        sharded = [dim for dim, size in enumerate(shape) if any(boxes[index][0][dim][2] != size for index in filled)]
        if len(sharded) <= 1:
            dim = sharded[0] if sharded else 0
            order = sorted(filled, key=lambda index: boxes[index][0][dim][1])
    in_place = (
        dim is not None
        and math.prod(shape[:dim]) <= 1
        and order == list(range(len(order)))
        and all(math.prod(shapes[index]) == length for index in order[:-1])
    )
    return Stack(shape, length, shapes, boxes, dim, tuple(order), in_place)


def _nbytes(stacks: dict[Coordinate, Stack]) -> int:
    return 1024 + sum(512 + boxes_bytes(stack.boxes) for stack in stacks.values())
