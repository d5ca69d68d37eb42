"""Run kernels, and carry out the communication that they request."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from .._torch.collectives import all_gather, all_reduce, all_to_all, wait
from ..comm.boxes import members
from ..comm.transport import from_wire, moves_natively, to_wire, wire_op
from ..errors import WorldError
from ..sharding.layout import Coordinate, Factor, Run, factor_range
from ..sharding.mesh import MeshInfo
from ..world import RankTensor, rank_int
from .kernel import Arrive, FactorShard, Fetch, Gather, KernelRun, LocalResult, Reduce, Request, Return, Rotate, Rows


class Pieces:
    """The ranks that share a sharded factor: their group, and the order of their shards."""

    def __init__(self, mesh_info: MeshInfo, factor: Factor) -> None:
        self.mesh_info, self.factor = mesh_info, factor
        self.axes = tuple(sorted(factor.axes))
        self.group = mesh_info.groups[self.axes]
        self.count = math.prod(mesh_info.sizes[axis] for axis in self.axes)
        origin = (0,) * len(mesh_info.sizes)
        peers = members(mesh_info.sizes, origin, self.axes)
        bounds = [factor_range(mesh_info.sizes, factor, peer) for peer in peers]
        # Group order is mesh order; where the minor axis comes first in the mesh, shards lie in another order. Empty
        # shards are in the order of their coordinates on the factor's axes, major to minor.
        places = [tuple([peer[axis] for axis in factor.axes]) for peer in peers]
        self.order = sorted(range(self.count), key=lambda index: (bounds[index], places[index]))
        self.bounds: tuple[Run, ...] = tuple(bounds[index] for index in self.order)
        self.in_order = self.order == list(range(self.count))

    @property
    def by_group(self) -> list[int]:
        """The piece at each position of the group."""
        return [self.order.index(index) for index in range(self.count)]

    def shard(self, at: Coordinate) -> FactorShard:
        """Return the shard of the rank at a coordinate."""
        index = 0
        for axis in self.axes:
            index = index * self.mesh_info.sizes[axis] + at[axis]
        counts = tuple(self.mesh_info.sizes[axis] for axis in self.factor.axes)
        return FactorShard(self.factor.size, self.bounds, self.order.index(index), counts)


class JointPieces(Pieces):
    """The ranks that share several sharded factors, in group order; `bounds` say only how much each of them holds."""

    def __init__(self, mesh_info: MeshInfo, factors: Sequence[Factor]) -> None:
        self.mesh_info = mesh_info
        self.axes = tuple(sorted(axis for factor in factors for axis in factor.axes))
        self.factor = Factor(math.prod(factor.size for factor in factors), self.axes)
        self.group = mesh_info.groups[self.axes]
        bounds, start = [], 0
        for peer in members(mesh_info.sizes, (0,) * len(mesh_info.sizes), self.axes):
            ranges = [factor_range(mesh_info.sizes, factor, peer) for factor in factors]
            held = math.prod(stop - first for first, stop in ranges)
            bounds.append((start, start + held))
            start += held
        self.count, self.bounds = len(bounds), tuple(bounds)
        self.order, self.in_order = list(range(self.count)), True


def drive(pieces: Pieces, start: Callable[[Coordinate, int], KernelRun]) -> LocalResult:
    """Run a kernel, created for each rank by `start(coordinate, rank)`, and return its results as local tensors."""
    mesh_info = pieces.mesh_info
    if not mesh_info.simulated:
        return _drive_one(pieces, start(mesh_info.coordinate, 0))
    runs = [start(at, rank) for rank, at in enumerate(mesh_info.coordinates)]
    return _drive_all(pieces, runs)


def _drive_one(pieces: Pieces, run: KernelRun) -> LocalResult:
    try:
        request = next(run)
        while True:
            request = run.send(_perform(pieces, request, pieces.shard(pieces.mesh_info.coordinate).piece))
    except StopIteration as end:
        result: LocalResult = end.value
        return result


def _drive_all(pieces: Pieces, runs: Sequence[KernelRun]) -> LocalResult:
    answers: Sequence[Tensor | None] = [None] * len(runs)
    while True:
        requests: list[Request] = []
        results: list[LocalResult] = []
        for run, answer in zip(runs, answers, strict=True):
            try:
                requests.append(next(run) if answer is None else run.send(answer))
            except StopIteration as end:
                results.append(end.value)
        if not requests:
            return _stack(results)
        if results or len({type(request) for request in requests}) > 1:
            kinds = sorted({type(request).__name__ for request in requests} | ({"a result"} if results else set()))
            raise WorldError(
                f"a kernel yields different requests on different ranks: {' and '.join(kinds)}",
                "yield the same requests in the same order on every rank, also on those with empty shards",
            )
        joint = requests[0]._replace(tensor=RankTensor([request.tensor.contiguous() for request in requests]))
        own = [pieces.shard(at).piece for at in pieces.mesh_info.coordinates]
        answers = cast(RankTensor, _perform(pieces, joint, own)).shards


def _stack(results: Sequence[Any]) -> LocalResult:
    """Merge the results of all ranks into one, whose tensors are RankTensors."""
    first = results[0]
    if isinstance(first, Tensor):
        return RankTensor(results)
    if isinstance(first, (tuple, list)):
        return type(first)(_stack(column) for column in zip(*results, strict=True))
    if isinstance(first, dict):
        return {name: _stack([result[name] for result in results]) for name in first}
    return first


def _perform(pieces: Pieces, request: Request, own: int | list[int]) -> Tensor:
    tensor = request.tensor if isinstance(own, list) else request.tensor.contiguous()
    if pieces.count == 1 and not isinstance(request, (Fetch, Return)):  # no other rank takes part
        return tensor.unsqueeze(0) if isinstance(request, Gather) else tensor
    if isinstance(request, Gather):
        gathered = from_wire(wait(all_gather(to_wire(tensor).unsqueeze(0), pieces.count, pieces.group)), tensor.dtype)
        return gathered if pieces.in_order else gathered[pieces.order]
    if isinstance(request, Reduce):
        reduced = wait(all_reduce(to_wire(tensor, request.op), wire_op(tensor.dtype, request.op), pieces.group))
        return from_wire(reduced, tensor.dtype, request.op)
    if isinstance(request, Arrive):
        arrived: Tensor = wait(tensor)
        return arrived
    if isinstance(request, Rotate):
        return _rotate(pieces, tensor, request.rows, own)
    return _move_rows(pieces, request, own)


def _rotate(pieces: Pieces, tensor: Tensor, rows: Sequence[int], own: int | list[int]) -> Tensor:
    """Start to send each piece's tensor to the next one."""
    each = own if isinstance(own, list) else [own]
    sent, received = [], []
    for piece in each:
        # by position in the group
        sent.append([rows[piece] if p == (piece + 1) % pieces.count else 0 for p in pieces.by_group])
        before = (piece - 1) % pieces.count
        received.append([rows[before] if p == before else 0 for p in pieces.by_group])
    if not isinstance(own, list):
        return cast(Tensor, all_to_all(tensor, received[0], sent[0], pieces.group))
    columns = [[rank_int(column) for column in zip(*splits, strict=True)] for splits in (received, sent)]
    return cast(Tensor, all_to_all(tensor, *columns, pieces.group))


def _move_rows(pieces: Pieces, request: Fetch | Return, own: int | list[int]) -> Tensor:
    fetching = isinstance(request, Fetch)
    have, need = (request.held, request.wanted) if isinstance(request, Fetch) else (request.computed, request.held)
    each = own if isinstance(own, list) else [own]
    plans = [_RowPlan(pieces, have, need, piece) for piece in each]
    shards = request.tensor.shards if isinstance(request.tensor, RankTensor) else (request.tensor,)
    packed = [plan.pack(shard, request.dim) for plan, shard in zip(plans, shards, strict=True)]
    # dtypes that a backend cannot move travel as bytes.
    dtype = shards[0].dtype
    native = moves_natively(dtype)
    unit = 1 if native else dtype.itemsize
    packed = packed if native else [buffer.view(torch.uint8) for buffer in packed]
    row = [unit * math.prod(n for d, n in enumerate(shard.shape) if d != request.dim) for shard in shards]
    out = [[rows * size for rows in plan.send_rows] for plan, size in zip(plans, row, strict=True)]
    into = [[rows * size for rows in plan.receive_rows] for plan, size in zip(plans, row, strict=True)]
    received: Sequence[Tensor]
    if pieces.count == 1:
        received = packed
    elif isinstance(own, list):
        columns = [[rank_int(column) for column in zip(*splits, strict=True)] for splits in (into, out)]
        received = wait(all_to_all(RankTensor(packed), *columns, pieces.group)).shards
    else:
        received = (wait(all_to_all(packed[0], into[0], out[0], pieces.group)),)
    received = received if native else [buffer.view(dtype) for buffer in received]
    results = [
        plan.unpack(buffer, shard, request.dim, add=not fetching)
        for plan, buffer, shard in zip(plans, received, shards, strict=True)
    ]
    return RankTensor(results) if isinstance(own, list) else results[0]


class _RowPlan:
    """Which rows one piece sends to every piece and receives from it, in group order."""

    def __init__(self, pieces: Pieces, have: Sequence[Rows], need: Sequence[Rows], mine: int) -> None:
        held, wanted = [_runs(rows) for rows in have], [_runs(rows) for rows in need]
        self.send = [_overlaps(held[mine], wanted[piece]) for piece in pieces.by_group]
        self.receive = [_overlaps(held[piece], wanted[mine]) for piece in pieces.by_group]
        self.send_rows = [sum(overlap.rows for overlap in overlaps) for overlaps in self.send]
        self.receive_rows = [sum(overlap.rows for overlap in overlaps) for overlaps in self.receive]
        self.needed = sum(stop - start for start, stop in wanted[mine])

    def pack(self, tensor: Tensor, dim: int) -> Tensor:
        rows = [tensor.narrow(dim, overlap.source, overlap.rows).reshape(-1) for peer in self.send for overlap in peer]
        return torch.cat(rows) if rows else tensor.new_empty(0)

    def unpack(self, buffer: Tensor, like: Tensor, dim: int, add: bool) -> Tensor:
        shape = list(like.shape)
        shape[dim] = self.needed
        result = like.new_zeros(shape)
        begin = 0
        for overlap in (overlap for peer in self.receive for overlap in peer):
            shape[dim] = overlap.rows
            part = buffer[begin : begin + math.prod(shape)].view(shape)
            target = result.narrow(dim, overlap.target, overlap.rows)
            target.add_(part) if add else target.copy_(part)
            begin += math.prod(shape)
        return result


class _Overlap(NamedTuple):
    """Rows that one piece has and another needs: where they start in the two local tensors, and how many."""

    source: int
    target: int
    rows: int


def _runs(rows: Rows) -> tuple[Run, ...]:
    """Return the runs of `rows` that are not empty; `rows` may be a single run without a list around it."""
    runs = cast(Sequence[Run], (rows,) if rows and isinstance(rows[0], int) else rows)
    return tuple((start, stop) for start, stop in runs if stop > start)


def _overlaps(have: Sequence[Run], need: Sequence[Run]) -> list[_Overlap]:
    found, target = [], 0
    for need_start, need_stop in need:
        source = 0
        for have_start, have_stop in have:
            start, stop = max(have_start, need_start), min(have_stop, need_stop)
            if stop > start:
                found.append(_Overlap(source + start - have_start, target + start - need_start, stop - start))
            source += have_stop - have_start
        target += need_stop - need_start
    return found
