"""Redistribution: bring a local tensor from one spec to another.

Plans and their bound moves are cached by the pair of interned specs, so a repeated redistribution is a dictionary
look-up and its collectives.

>>> print(plan(x._spec, y._spec))
f32[8@dp, 16] -> f32[8, 16@dp]   1 collective, 192 B received by a rank
  1. all-to-all           over dp              192 B   f32[8, 16@dp]
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from ..errors import MeshError
from ..sharding.mesh import MeshInfo
from ..sharding.spec import DTensorSpec, in_memory_order, memory_order
from .cost import Links, cost_model, generation
from .groups import adopt
from .moves import LocalOp, Move, bind, on_ranks, wait
from .plan import SpecPlan
from .planner import make_plan

_BelowAutograd = torch._C._AutoDispatchBelowAutograd


def plan(source: DTensorSpec, target: DTensorSpec) -> SpecPlan:
    """What it takes to bring a tensor from one spec to another. Prints as readable steps with bytes."""
    return _plan(source, target, generation(), source.mesh_info.adopted)


@lru_cache(maxsize=16384)
def _plan(source: DTensorSpec, target: DTensorSpec, generation: int, adopted: bool) -> SpecPlan:
    if source.mesh_info is not target.mesh_info:
        raise MeshError(
            f"from {source!r} on {source.mesh_info!r} to {target!r} on {target.mesh_info!r}: "
            "a tensor stays on its mesh",
            "use placements of the tensor's own mesh, or full_tensor() and distribute_tensor on the other one",
        )
    mesh_info = source.mesh_info
    groups = frozenset(mesh_info.groups) if adopted else None
    links = _links(mesh_info, generation)
    return SpecPlan(source, target, make_plan(source.layout, target.layout, source.dtype.itemsize, links, groups))


def links_of(mesh_info: MeshInfo) -> Links:
    """What communication costs on a mesh, by the cost model in use."""
    return _links(mesh_info, generation())


@lru_cache(maxsize=256)
def _links(mesh_info: MeshInfo, generation: int) -> Links:
    return cost_model().links(mesh_info)


@lru_cache(maxsize=16384)
def _moves(source: DTensorSpec, target: DTensorSpec, generation: int) -> tuple[Move, ...]:
    adopt(source.mesh)
    steps = _plan(source, target, generation, True).plan.steps
    moves = tuple(bind(step, source.mesh_info, source.dtype) for step in steps)
    order = memory_order(target.tensor_meta)
    if moves and order is not None:
        # Moved data is row-major. Where the target is not, views that are legal on one device must stay so here.
        moves += (Move(on_ranks(source.mesh_info, lambda at, local: in_memory_order(local, order)), False, None),)
    return moves


def redistribute_local(local: Tensor, source: DTensorSpec, target: DTensorSpec) -> Tensor:
    """The local tensor after redistribution. The same tensor if there is nothing to do."""
    moves = _moves(source, target, generation())
    if not moves:
        return local
    with _BelowAutograd():  # gradients are the caller's; above autograd each collective costs twice as much
        for start, communicates, finish in moves:
            local = start(local)
            if communicates:
                local = wait(local)
            if finish is not None:
                local = finish(local)
    return local


def start_redistribute(local: Tensor, source: DTensorSpec, target: DTensorSpec) -> Callable[[], Tensor]:
    """Begin a redistribution. The last collective is still under way on return; the result of the call waits for it."""
    moves = _moves(source, target, generation())
    last = max((i for i, move in enumerate(moves) if move.communicates), default=-1)
    for i, (start, communicates, finish) in enumerate(moves):
        local = start(local)
        if i == last:
            after = moves[i + 1 :]
            return lambda: _complete(local, finish, after)
        local = wait(local) if communicates else local
        local = finish(local) if finish is not None else local
    return lambda: local


def _complete(raw: Tensor, finish: LocalOp | None, after: tuple[Move, ...]) -> Tensor:
    local = wait(raw)
    local = finish(local) if finish is not None else local
    for start, _, _ in after:  # local moves only
        local = start(local)
    return local
