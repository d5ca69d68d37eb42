"""Run a change of mesh on local tensors.

A rank that is in only one of the meshes has an empty local tensor on the other. A rank that is in neither does not take
part, whether it makes the call or not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..sharding.layout import Coordinate
from ..sharding.memory_order import in_memory_order
from ..sharding.mesh import MeshInfo
from ..sharding.spec import DTensorSpec
from ..world import RankTensor
from .bind_move import bind_move
from .groups import adopt
from .mesh_change import MeshChange, needing_axes, plan_mesh_change
from .move import Move
from .on_ranks import on_ranks, shard_outside
from .rank_group import group_over
from .streaming import Load, Slice, copy_own, start_round
from .transport import identity, reduce_locally


class MeshMove(NamedTuple):
    """A change of mesh in three parts: moves on the source mesh, the exchange, and moves on the target mesh."""

    before: tuple[Move, ...]
    begin: Callable[[Tensor], Callable[[], Tensor]]
    """Start the exchange, and return a function that waits for it and returns the local tensor on the target mesh."""
    after: tuple[Move, ...]

    def moves(self) -> tuple[Move, ...]:
        """Return all moves, with the exchange as one of them."""
        return (*self.before, Move(lambda local: self.begin(local)(), False, None), *self.after)


def bind_mesh_change(source: DTensorSpec, target: DTensorSpec) -> MeshMove:
    """Return the moves that carry a tensor from one mesh to another."""
    for spec in (source, target):
        if not spec.mesh_info.adopted:
            adopt(spec.mesh)
    change = plan_mesh_change(source, target)
    steps = () if source.mesh_info.outside else change.reduction.steps
    before = tuple(bind_move(step, source.mesh_info, source.dtype) for step in steps)
    after: tuple[Move, ...] = ()
    order = target.memory_order
    if order is not None and not target.mesh_info.outside and not change.keeps_shards:
        order = order._replace(expanded=tuple(dim for dim in order.expanded if source.stride[dim] == 0))
        after = (Move(on_ranks(target.mesh_info, lambda at, local: in_memory_order(local, order)), False, None),)
    return MeshMove(before, (lambda local: lambda: local) if change.keeps_shards else partial(_begin, change), after)


def _begin(change: MeshChange, local: Tensor) -> Callable[[], Tensor]:
    shards = shards_here(local, change.pair.source)
    device = local.device if shards else torch.device(change.pair.source.device_type)
    results = _allocate(change, device)
    stacked = _stacked(change, results) if change.op else {}
    loads = [
        Load(route, shards, {rank: each[index] for rank, each in stacked.items()} if change.op else results)
        for index, route in enumerate(change.routes)
    ]
    under_way = [] if device.type == "meta" else _send(loads, change, device)

    def complete() -> Tensor:
        for finish in under_way:
            finish()
        for rank, operands in stacked.items():
            results[rank].copy_(reduce_locally(operands, change.op, change.divisor))
        return _joined(results, change.target)

    return complete


def _send(loads: Sequence[Load], change: MeshChange, device: torch.device) -> list[Callable[[], None]]:
    """Run all rounds but the last, which is started. Return the function that finishes it, in a list; else `[]`."""
    for load in loads:
        copy_own(load)
    last: list[Callable[[], None]] = []
    if change.exchanges and not change.pair.outside:
        group = group_over(change.pair.ranks)
        for turn in range(change.rounds):
            while last:
                last.pop()()  # frees the buffers of the round before
            slices = [Slice(load, turn, change.rounds) for load in loads]
            last.append(start_round(slices, group, change.source.dtype, device))
    return last


def _allocate(change: MeshChange, device: torch.device) -> dict[int, Tensor]:
    """Allocate the target's shards of the ranks here. Those that get no value of a Partial target hold the identity."""
    spec, ops = change.target, dict(change.target.layout.partial)
    found = {}
    for rank, at in places_here(spec.mesh_info):
        made = torch.empty(spec.layout.local_shape(at), dtype=spec.dtype, device=device)
        axis = _filled_axis(spec, at)
        found[rank] = made if axis is None else made.fill_(identity(spec.dtype, ops[axis]))
    return found


def _filled_axis(spec: DTensorSpec, at: Coordinate) -> int | None:
    """Return the Partial axis whose identity a rank holds instead of the value: the outermost, which is reduced last.

    None for ranks that hold the value.
    """
    return next((axis for axis in needing_axes(spec) if at[axis]), None)


def _stacked(change: MeshChange, results: dict[int, Tensor]) -> dict[int, Tensor]:
    """Allocate memory for all operands, on the ranks that reduce them."""
    spec, count = change.target, len(change.routes)
    reducing = (rank for rank, at in places_here(spec.mesh_info) if _filled_axis(spec, at) is None)
    return {rank: results[rank].new_empty((count, *results[rank].shape)) for rank in reducing}


def places_here(mesh_info: MeshInfo) -> list[tuple[int, Coordinate]]:
    """Return the ranks of a mesh that this process runs, with their coordinates."""
    if mesh_info.simulated:
        return list(zip(mesh_info.ranks, mesh_info.coordinates, strict=True))
    return [] if mesh_info.outside else [(dist.get_rank(), mesh_info.coordinate)]


def shards_here(local: Tensor, mesh_info: MeshInfo) -> dict[int, Tensor]:
    """Return the local shards of the ranks of a mesh that this process runs, by rank."""
    if isinstance(local, RankTensor):
        return dict(zip(mesh_info.ranks, local.shards, strict=True))
    return {} if mesh_info.outside else {dist.get_rank(): local}


def _joined(shards: dict[int, Tensor], spec: DTensorSpec) -> Tensor:
    mesh_info = spec.mesh_info
    if not shards:
        return shard_outside(spec.ndim, spec.dtype, torch.device(mesh_info.device_type))
    kinds = (mesh_info.device_type, "meta")
    moved = [shard if shard.device.type in kinds else shard.to(mesh_info.device_type) for shard in shards.values()]
    return RankTensor(moved) if mesh_info.simulated else moved[0]
