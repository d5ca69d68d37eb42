"""Redistribution of a local tensor from one spec to another.

Plans and their bound moves are cached by the pair of interned specs, so a repeated redistribution is a dictionary
look-up and its collectives.

>>> print(plan_redistribution(x._spec, y._spec))
f32[8@dp, 16] -> f32[8, 16@dp]   1 collective, 192 B received by a rank
  1. all-to-all           over dp              192 B   f32[8, 16@dp]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from .._torch.below_autograd import below_autograd
from .._torch.collectives import wait
from ..errors import CommunicationError, MeshError
from ..sharding.cache import ENTRY_BYTES
from ..sharding.memory_order import in_memory_order
from ..sharding.mesh import require_world
from ..sharding.observers import Around, Observers
from ..sharding.runtime import Runtime, WorldCache, active_runtime, on_activate
from ..sharding.spec import DTensorSpec
from .bind_move import bind_move
from .cost import links_of
from .groups import adopt
from .mesh_move import bind_mesh_change
from .move import Move
from .on_ranks import LocalOp, on_ranks
from .plan import SpecPlan
from .planner import make_plan

SpecPair = tuple[DTensorSpec, DTensorSpec]
_STEP_BYTES = 512

_PLANS: WorldCache[SpecPair, SpecPlan] = WorldCache(
    "redistribution plans", 8 << 20, lambda pair, plan: ENTRY_BYTES + _STEP_BYTES * len(plan.plan.steps)
)
_MOVES: WorldCache[SpecPair, tuple[Move, ...]] = WorldCache(
    "bound moves", 32 << 20, lambda pair, moves: ENTRY_BYTES + sum(move.nbytes for move in moves)
)


class _Moves(Protocol):
    def get(self, pair: SpecPair, /) -> tuple[Move, ...] | None:
        """Return the cached moves between two specs, or None."""


_active_moves: _Moves
"""The bound moves of the active world that were used recently: what `redistribute_local` looks up first."""


def _use_moves_of(runtime: Runtime) -> None:
    global _active_moves
    _active_moves = _OBSERVED if REDISTRIBUTIONS.present else _MOVES.of(runtime).recent


# ---- observers ------------------------------------------------------------------------------------------------------

REDISTRIBUTIONS: Observers[[DTensorSpec, DTensorSpec, Tensor], Around] = Observers()
"""Redistributions that move data. While somebody observes, the table of moves is swapped (`_ObservedMoves`)."""


class _ObservedMoves:
    """Replaces the table of moves while there are observers. Its moves run inside the observers' contexts."""

    def get(self, pair: SpecPair, /) -> tuple[Move, ...]:
        """Return all moves between two specs, combined into one."""
        moves = moves_between(*pair)

        def run(local: Tensor) -> Tensor:
            with REDISTRIBUTIONS.around(*pair, local):
                return carry_out(moves, local)

        return (Move(run, False, None),) if moves else ()


_OBSERVED = _ObservedMoves()
on_activate(_use_moves_of)
REDISTRIBUTIONS.on_change(lambda: _use_moves_of(active_runtime()))


def plan_redistribution(source: DTensorSpec, target: DTensorSpec) -> SpecPlan:
    """Return the plan that redistributes a tensor from one spec to another. It prints as steps with bytes."""
    mesh_info = source.mesh_info
    if not mesh_info.adopted:
        return _make_plan(source, target)  # not cached: with the groups that adopt() makes, the plan may differ
    plans = _PLANS.of(mesh_info.runtime)
    found = plans.get((source, target))
    if found is None:
        found = plans[source, target] = _make_plan(source, target)
    return found


def _make_plan(source: DTensorSpec, target: DTensorSpec) -> SpecPlan:
    mesh_info = source.mesh_info
    if mesh_info is not target.mesh_info:
        raise MeshError(
            f"a plan on one mesh cannot go from {source!r} on {mesh_info!r} to {target!r} on {target.mesh_info!r}",
            "use shardwise.plan(x, other_mesh, placements), which also plans changes of mesh",
        )
    if source.layout.shape != target.layout.shape:
        raise CommunicationError(
            f"{source!r} cannot be redistributed to {target!r}, which has another shape",
            f"give both specs the shape {list(source.shape)}; x.view and its like change the shape of a tensor",
        )
    groups = frozenset(mesh_info.groups) if mesh_info.adopted else None
    try:
        steps = make_plan(source.layout, target.layout, source.dtype.itemsize, links_of(mesh_info), groups)
    except CommunicationError as error:
        problem = f"{source!r} cannot be redistributed to {target!r} on {mesh_info!r}: {error.problem}"
        raise CommunicationError(problem, error.fix) from None
    return SpecPlan(source, target, steps)


def moves_between(source: DTensorSpec, target: DTensorSpec) -> tuple[Move, ...]:
    """Return the moves between two specs: one for each step of the plan, and perhaps one to reorder memory."""
    mesh_info = source.mesh_info
    require_world()  # the tensor may have outlived its world
    if not mesh_info.adopted:
        adopt(mesh_info.mesh)
    cache = _MOVES.of(mesh_info.runtime)
    found = cache.get((source, target))
    if found is None:
        found = cache[source, target] = _bind_plan(source, target)
    return found


def _bind_plan(source: DTensorSpec, target: DTensorSpec) -> tuple[Move, ...]:
    if source.mesh_info is not target.mesh_info:
        return bind_mesh_change(source, target).moves()
    if source.mesh_info.outside:
        return ()
    steps = plan_redistribution(source, target).plan.steps
    moves = tuple(bind_move(step, source.mesh_info, source.dtype) for step in steps)
    order = target.memory_order
    if moves and order is not None:
        # Moved data is row-major. It takes the target's memory order, so that views legal on one device are legal here.
        repeats = tuple(dim for dim in order.expanded if source.stride[dim] == 0)
        order = order._replace(expanded=repeats)
        moves += (Move(on_ranks(source.mesh_info, lambda at, local: in_memory_order(local, order)), False, None),)
    return moves


def redistribute_local(local: Tensor, source: DTensorSpec, target: DTensorSpec) -> Tensor:
    """Return the local tensor after redistribution, or the same tensor if there is nothing to do."""
    moves = _active_moves.get((source, target))
    if moves is None:
        moves = moves_between(source, target)
    if not moves:
        return local
    with below_autograd():  # the caller handles gradients; above autograd each collective costs twice as much
        return carry_out(moves, local)


def carry_out(moves: tuple[Move, ...], local: Tensor) -> Tensor:
    """Run these moves, wait for all collectives, and return the local tensor."""
    for start, communicates, finish, _, _ in moves:
        local = start(local)
        if communicates:
            local = wait(local)
        if finish is not None:
            local = finish(local)
    return local


def start_redistribute(local: Tensor, source: DTensorSpec, target: DTensorSpec) -> Callable[[], Tensor]:
    """Start a redistribution, and return a function that waits for its last collective and returns the local tensor."""
    if source.mesh_info is not target.mesh_info:
        with REDISTRIBUTIONS.around(source, target, local):
            return _start_mesh_change(local, source, target)
    moves = moves_between(source, target)
    if REDISTRIBUTIONS.present and moves:
        with REDISTRIBUTIONS.around(source, target, local):
            return _start(moves, local)
    return _start(moves, local)


def _start(moves: tuple[Move, ...], local: Tensor) -> Callable[[], Tensor]:
    last = max((i for i, move in enumerate(moves) if move.communicates), default=-1)
    for i, (start, communicates, finish, _, copies) in enumerate(moves):
        if i == last == 0 and not copies:
            # The collective reads its input until it is waited for; the source may be written before that.
            local = local.clone()
        local = start(local)
        if i == last:
            after = moves[i + 1 :]
            return lambda: _complete(local, finish, after)
        local = wait(local) if communicates else local
        local = finish(local) if finish is not None else local
    return lambda: local


def _start_mesh_change(local: Tensor, source: DTensorSpec, target: DTensorSpec) -> Callable[[], Tensor]:
    require_world()
    before, begin, after = bind_mesh_change(source, target)
    complete = begin(carry_out(before, local))
    return lambda: carry_out(after, complete())


def _complete(raw: Tensor, finish: LocalOp | None, after: tuple[Move, ...]) -> Tensor:
    local = wait(raw)
    local = finish(local) if finish is not None else local
    for move in after:  # local moves only
        local = move.start(local)
    return local
