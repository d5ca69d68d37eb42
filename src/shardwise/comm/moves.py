"""Moves: the steps of a plan bound to a mesh, ready to run on local tensors.

A move starts (packs and begins its collective), is waited for if it communicates, and finishes (unpacks). What depends
on the rank goes through `on_ranks`: a real process does it for its own coordinate, the simulated world for every
rank. The collectives themselves are PyTorch's functional ops, which the simulated world understands too. They are
called as overloads, below autograd, with the group's name bound: the public functions cost six times as much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple, cast

import torch
from torch import Tensor

from .._torch.collectives import all_gather as all_gather
from .._torch.collectives import all_reduce as all_reduce
from .._torch.collectives import all_to_all as all_to_all
from .._torch.collectives import broadcast, reduce_scatter
from .._torch.collectives import wait as wait
from ..sharding.layout import Coordinate, Layout
from ..sharding.mesh import MeshInfo
from ..world import RankTensor, map_ranks, rank_int
from .boxes import Box, Schedule, intersection, schedule, schedule_bytes
from .plan import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, SLICE, TO_PARTIAL, Step
from .states import DistState, common_slots
from .transport import (
    check_reducible,
    from_wire,
    identity,
    moves_natively,
    reduce_locally,
    reduces_natively,
    to_wire,
    travels_as_is,
    wire_op,
)

LocalOp = Callable[[Tensor], Tensor]


class Move(NamedTuple):
    """`finish(wait(start(local)))`; no wait where nothing is communicated, no finish where nothing is left to do.

    `nbytes` is about what its functions keep in memory.
    """

    start: LocalOp
    communicates: bool
    finish: LocalOp | None
    nbytes: int = 1024


def bind(step: Step, mesh_info: MeshInfo, dtype: torch.dtype) -> Move:
    """The move that carries out a step on this mesh."""
    if step.op:
        check_reducible(dtype, step.op)
    if math.prod(step.after.shape) == 0:
        return Move(on_ranks(mesh_info, lambda at, local: local.new_empty(step.after.local_shape(at))), False, None)
    if step.kind == SLICE:
        return Move(on_ranks(mesh_info, lambda at, local: _take(step, at, local)), False, None)
    if step.kind == TO_PARTIAL:
        return Move(on_ranks(mesh_info, lambda at, local: _spread(step, at, local)), False, None)
    if step.kind == ALL_REDUCE:
        return _all_reduce_move(step, mesh_info, dtype)
    even = step.before.is_even() and step.after.is_even()
    if even and step.kind == ALL_GATHER:
        return _all_gather_move(step, mesh_info, dtype)
    if even and step.kind == REDUCE_SCATTER and reduces_natively(dtype, step.op):
        return _reduce_scatter_move(step, mesh_info, dtype)
    if even and step.kind == ALL_TO_ALL:
        return _all_to_all_move(step, mesh_info, dtype)
    return _exchange_move(step, mesh_info, dtype)


def on_ranks(mesh_info: MeshInfo, fn: Callable[[Coordinate, Tensor], Tensor]) -> LocalOp:
    """A local op from one that also takes the coordinate of the rank it works for."""

    def run(local: Tensor) -> Tensor:
        if isinstance(local, RankTensor):
            coordinates = mesh_info.coordinates
            return map_ranks(lambda rank, shard: fn(coordinates[rank], shard), local)
        return fn(mesh_info.coordinate, local)

    return run


def from_ranks(mesh_info: MeshInfo, fn: Callable[[Coordinate], Tensor]) -> Tensor:
    """A local tensor made from nothing but the coordinate of its rank."""
    if mesh_info.simulated:
        coordinates = mesh_info.coordinates
        return map_ranks(lambda rank: fn(coordinates[rank]))
    return fn(mesh_info.coordinate)


# ---- even moves: reshapes around one native collective --------------------------------------------------------------


class _Slotted(NamedTuple):
    """Both sides of a step over common slots: the axes each side cuts a slot with, and what a rank then holds."""

    before: DistState
    after: DistState
    held_before: tuple[int, ...]
    held_after: tuple[int, ...]


def _slotted(step: Step) -> _Slotted:
    slots = common_slots(step.before, step.after)
    assert slots is not None, "the planner makes such steps over common slots only"
    sizes = [size for dim in slots.sizes for size in dim]
    mesh_sizes = step.before.mesh_sizes

    def held(state: DistState) -> tuple[int, ...]:
        pieces = [math.prod(mesh_sizes[axis] for axis in axes) for axes in state.slots]
        return tuple(size // count for size, count in zip(sizes, pieces, strict=True))

    return _Slotted(slots.source, slots.target, held(slots.source), held(slots.target))


def _grouped_to_local(step: Step, sides: _Slotted) -> LocalOp:
    """From one piece for each rank of the group, stacked in group order, to the local tensor after the step."""
    mesh_sizes, shape = step.before.mesh_sizes, step.after.local_shape((0,) * len(step.before.mesh_sizes))
    pieces = tuple(min(a, b) for a, b in zip(sides.held_before, sides.held_after, strict=True))
    stacked = [mesh_sizes[axis] for axis in step.axes] + list(pieces)
    order: list[int] = []
    for slot, (had, has) in enumerate(zip(sides.before.slots, sides.after.slots, strict=True)):
        gathered = had[len(has) :] if len(had) > len(has) else ()
        order += [step.axes.index(axis) for axis in gathered] + [len(step.axes) + slot]
    if _order_is_trivial(stacked, order):
        return lambda grouped: grouped.view(shape)
    # A reshape may be a view with strides of its own, but moved data is row-major.
    return lambda grouped: grouped.view(stacked).permute(order).contiguous().view(shape)


def _gathers_in_place(step: Step, sides: _Slotted) -> bool:
    """Whether the gathered pieces, one after the other, are already the result: the first dim, in group order."""
    gathered = sides.before.slots[0][len(sides.after.slots[0]) :]
    return gathered == step.axes and len(step.after.dims[0]) == 1 == len(step.before.dims[0])


def _local_to_grouped(step: Step, sides: _Slotted) -> LocalOp:
    """From the local tensor before the step to one piece for each rank of the group, stacked in group order."""
    mesh_sizes = step.before.mesh_sizes
    pieces = tuple(min(a, b) for a, b in zip(sides.held_before, sides.held_after, strict=True))
    split: list[int] = []
    piece_at, axis_at = [], {}
    for had, has, piece in zip(sides.before.slots, sides.after.slots, pieces, strict=True):
        for axis in has[len(had) :] if len(has) > len(had) else ():
            axis_at[axis] = len(split)
            split.append(mesh_sizes[axis])
        piece_at.append(len(split))
        split.append(piece)
    order = [axis_at[axis] for axis in step.axes] + piece_at
    if _order_is_trivial(split, order):
        return lambda local: local.contiguous().view(-1)
    return lambda local: local.reshape(split).permute(order).reshape(-1)


def _order_is_trivial(sizes: Sequence[int], order: Sequence[int]) -> bool:
    """Whether a permutation moves only dims of size 1."""
    moved = [index for index in order if sizes[index] != 1]
    return moved == sorted(moved)


def _group(step: Step, mesh_info: MeshInfo) -> tuple[str, int]:
    return mesh_info.groups[step.axes], math.prod(mesh_info.sizes[axis] for axis in step.axes)


def _all_gather_move(step: Step, mesh_info: MeshInfo, dtype: torch.dtype) -> Move:
    name, ranks = _group(step, mesh_info)
    sides = _slotted(step)
    arrange = _grouped_to_local(step, sides)
    if moves_natively(dtype):
        in_place = _gathers_in_place(step, sides)
        return Move(lambda local: all_gather(local.contiguous(), ranks, name), True, None if in_place else arrange)
    return Move(
        lambda local: all_gather(_as_bytes(local), ranks, name),
        True,
        lambda received: arrange(received.view(dtype)),
    )


def _all_to_all_move(step: Step, mesh_info: MeshInfo, dtype: torch.dtype) -> Move:
    name, ranks = _group(step, mesh_info)
    sides = _slotted(step)
    pack, arrange = _local_to_grouped(step, sides), _grouped_to_local(step, sides)
    piece = math.prod(sides.held_before) // ranks
    if moves_natively(dtype):
        splits = [piece] * ranks
        return Move(lambda local: all_to_all(pack(local), splits, splits, name), True, arrange)
    splits = [piece * dtype.itemsize] * ranks
    return Move(
        lambda local: all_to_all(_as_bytes(pack(local)), splits, splits, name),
        True,
        lambda received: arrange(received.view(dtype)),
    )


def _reduce_scatter_move(step: Step, mesh_info: MeshInfo, dtype: torch.dtype) -> Move:
    name, ranks = _group(step, mesh_info)
    pack = _local_to_grouped(step, _slotted(step))
    op, shape = wire_op(dtype, step.op), step.after.local_shape((0,) * len(mesh_info.sizes))
    return Move(
        lambda local: reduce_scatter(to_wire(pack(local), step.op), op, ranks, name),
        True,
        lambda received: from_wire(received, dtype, step.op).view(shape),
    )


def _all_reduce_move(step: Step, mesh_info: MeshInfo, dtype: torch.dtype) -> Move:
    name, ranks = _group(step, mesh_info)
    if reduces_natively(dtype, step.op):
        op = wire_op(dtype, step.op)
        if travels_as_is(dtype, step.op):
            return Move(lambda local: all_reduce(local.contiguous(), op, name), True, None)
        return Move(
            lambda local: all_reduce(to_wire(local.contiguous(), step.op), op, name),
            True,
            lambda received: from_wire(received, dtype, step.op),
        )

    def reduce(at: Coordinate, received: Tensor) -> Tensor:
        return reduce_locally(received.view(dtype).view(ranks, *step.after.local_shape(at)), step.op)

    return Move(lambda local: all_gather(_as_bytes(local), ranks, name), True, on_ranks(mesh_info, reduce))


# ---- any to any -----------------------------------------------------------------------------------------------------


def _exchange_move(step: Step, mesh_info: MeshInfo, dtype: torch.dtype) -> Move:
    """One all-to-all in which each rank sends each peer what it has and the peer needs; then, perhaps, a reduction."""
    name, ranks = _group(step, mesh_info)
    schedules: dict[Coordinate, Schedule] = {}

    def schedule_at(at: Coordinate) -> Schedule:
        found = schedules.get(at)
        if found is None:
            found = schedules[at] = schedule(step.before, step.after, at, step.axes)
        return found

    native = moves_natively(dtype)
    unit = 1 if native else dtype.itemsize
    outgoing = _splits(mesh_info, ranks, lambda at: [unit * size for size in schedule_at(at).send_sizes])
    incoming = _splits(mesh_info, ranks, lambda at: [unit * size for size in schedule_at(at).receive_sizes])

    def pack(at: Coordinate, local: Tensor) -> Tensor:
        flat = _pack(local, schedule_at(at).send)
        return flat if native else _as_bytes(flat)

    def unpack(at: Coordinate, received: Tensor) -> Tensor:
        received = received if native else received.view(dtype)
        shape = step.after.local_shape(at)
        if step.op:
            # Every peer sends its operand of the same boxes, one after the other.
            sent = zip(received.view(ranks, -1), schedule_at(at).receive, strict=True)
            operands = [_unpack(operand, [boxes], shape) for operand, boxes in sent]
            return reduce_locally(torch.stack(operands), step.op)
        return _unpack(received, schedule_at(at).receive, shape)

    packed, unpacked = on_ranks(mesh_info, pack), on_ranks(mesh_info, unpack)
    nbytes = sum(map(schedule_bytes, schedules.values()))
    return Move(lambda local: all_to_all(packed(local), incoming, outgoing, name), True, unpacked, nbytes)


def _splits(mesh_info: MeshInfo, ranks: int, sizes_at: Callable[[Coordinate], list[int]]) -> list[int]:
    """The split sizes of an all-to-all; per rank where the world is simulated."""
    if not mesh_info.simulated:
        return sizes_at(mesh_info.coordinate)
    by_rank = [sizes_at(at) for at in mesh_info.coordinates]
    # Sizes that differ between ranks are SymInts, which the op takes as well as ints.
    return [cast(int, rank_int([sizes[peer] for sizes in by_rank])) for peer in range(ranks)]


def _pack(local: Tensor, boxes_by_peer: Sequence[Sequence[Box]]) -> Tensor:
    pieces = [_box(local, box, 0).reshape(-1) for boxes in boxes_by_peer for box in boxes]
    return torch.cat(pieces) if pieces else local.new_empty(0)


def _unpack(received: Tensor, boxes_by_peer: Sequence[Sequence[Box]], shape: Sequence[int]) -> Tensor:
    result = received.new_empty(shape)
    start = 0
    for boxes in boxes_by_peer:
        for box in boxes:
            lengths = [length for _, _, length in box]
            stop = start + math.prod(lengths)
            _box(result, box, 1).copy_(received[start:stop].view(lengths))
            start = stop
    return result


def _box(tensor: Tensor, box: Box, side: int) -> Tensor:
    """A box of a local tensor, by its offsets on the sending (0) or the receiving (1) side."""
    for dim, entry in enumerate(box):
        if entry[2] != tensor.shape[dim]:
            tensor = tensor.narrow(dim, entry[side], entry[2])
    return tensor


# ---- local moves ----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=65536)
def _overlap(before: Layout, after: Layout, at: Coordinate) -> tuple[Box, ...]:
    return intersection(before.runs(at), after.runs(at))


def _take(step: Step, at: Coordinate, local: Tensor) -> Tensor:
    """Keep what the layout after the step needs of what the rank holds. Always a copy, never an alias."""
    return take(local, step.before, step.after, at)


def take(local: Tensor, before: Layout, after: Layout, at: Coordinate) -> Tensor:
    """The part of a local tensor that a layout inside the present one leaves to the rank, as a copy."""
    boxes = _overlap(before, after, at)
    if len(boxes) == 1:
        return _box(local, boxes[0], 0).clone(memory_format=torch.contiguous_format)
    result = local.new_empty(after.local_shape(at))
    for box in boxes:
        _box(result, box, 1).copy_(_box(local, box, 0))
    return result


def _spread(step: Step, at: Coordinate, local: Tensor) -> Tensor:
    """Make a replicated or cut axis Partial: other ranks' parts become the identity of the reduction."""
    ((axis, op),) = set(step.after.partial) - set(step.before.partial)
    fill = identity(local.dtype, op)
    if step.before.dims == step.after.dims:
        if at[axis] == 0 or op in ("avg", "max", "min"):
            return local.clone(memory_format=torch.contiguous_format)
        return torch.full_like(local, fill, memory_format=torch.contiguous_format)
    result = local.new_full(step.after.local_shape(at), fill)
    for box in _overlap(step.before, step.after, at):
        part = _box(local, box, 0)
        if op == "avg":
            # float8 has no arithmetic
            part = (part.float() if part.dtype.itemsize == 1 else part) * step.before.mesh_sizes[axis]
        _box(result, box, 1).copy_(part)
    return result


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


# ---- from a source rank ---------------------------------------------------------------------------------------------


def scatter_move(
    before: Layout, after: Layout, axis: int, source: int, mesh_info: MeshInfo, dtype: torch.dtype
) -> LocalOp:
    """One rank along an axis hands out what each needs of what it holds; `before` does not use the axis."""
    name, ranks = mesh_info.groups[(axis,)], mesh_info.sizes[axis]
    native = moves_natively(dtype)
    unit = 1 if native else dtype.itemsize

    def boxes_for(at: Coordinate, index: int) -> tuple[Box, ...]:
        peer = (*at[:axis], index, *at[axis + 1 :])
        return intersection(before.runs(peer), after.runs(peer))

    def outgoing(at: Coordinate) -> list[int]:
        if at[axis] != source:
            return [0] * ranks
        return [unit * sum(math.prod(n for *_, n in box) for box in boxes_for(at, i)) for i in range(ranks)]

    def incoming(at: Coordinate) -> list[int]:
        size = unit * math.prod(after.local_shape(at))
        return [size if index == source else 0 for index in range(ranks)]

    def pack(at: Coordinate, local: Tensor) -> Tensor:
        boxes = [boxes_for(at, index) for index in range(ranks)] if at[axis] == source else []
        flat = _pack(local, boxes)
        return flat if native else _as_bytes(flat)

    def unpack(at: Coordinate, received: Tensor) -> Tensor:
        received = received if native else received.view(dtype)
        return _unpack(received, [boxes_for(at, at[axis])], after.local_shape(at))

    packed, unpacked = on_ranks(mesh_info, pack), on_ranks(mesh_info, unpack)
    into, out = _splits(mesh_info, ranks, incoming), _splits(mesh_info, ranks, outgoing)
    return lambda local: unpacked(wait(all_to_all(packed(local), into, out, name)))


def broadcast_move(axis: int, source: int, mesh_info: MeshInfo, dtype: torch.dtype) -> LocalOp:
    """One rank along an axis gives all the others a copy of what it holds."""
    name = mesh_info.groups[(axis,)]
    if moves_natively(dtype):
        return lambda local: wait(broadcast(local.contiguous(), source, name))
    return lambda local: wait(broadcast(_as_bytes(local), source, name)).view(dtype).view(local.shape)


def all_gather_ranks(message: Tensor, mesh_info: MeshInfo) -> Tensor:
    """One row for each rank of this rank's mesh, in mesh order, from a vector of equal length on each."""
    table = message.view(1, -1)
    for axis in reversed(range(len(mesh_info.sizes))):
        if mesh_info.sizes[axis] > 1:
            table = wait(all_gather(table, mesh_info.sizes[axis], mesh_info.groups[(axis,)]))
    return table
