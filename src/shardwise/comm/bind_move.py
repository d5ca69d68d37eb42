"""Choose the move that carries out a step of a plan."""

from __future__ import annotations

import math

import torch

from ..sharding.mesh import MeshInfo
from .even_moves import all_gather_move, all_reduce_move, all_to_all_move, reduce_scatter_move
from .exchange import exchange_move
from .local_moves import make_partial, take_slice
from .move import Move
from .on_ranks import on_ranks
from .padded_moves import padded_all_gather_move, padded_reduce_scatter_move
from .plan import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, SLICE, TO_PARTIAL, Step
from .transport import check_reducible, reduces_natively


def bind_move(step: Step, mesh_info: MeshInfo, dtype: torch.dtype) -> Move:
    """Return the move that carries out a step on tensors of this dtype on this mesh."""
    if step.op:
        check_reducible(dtype, "avg" if step.divisor > 1 else step.op)
    if math.prod(step.after.shape) == 0:
        return Move(on_ranks(mesh_info, lambda at, local: local.new_empty(step.after.local_shape(at))), False, None)
    if step.kind == SLICE:
        return Move(on_ranks(mesh_info, lambda at, local: take_slice(local, step.before, step.after, at)), False, None)
    if step.kind == TO_PARTIAL:
        return Move(on_ranks(mesh_info, lambda at, local: make_partial(step, at, local)), False, None)
    if step.kind == ALL_REDUCE:
        return all_reduce_move(step, mesh_info, dtype)
    even = step.before.is_even() and step.after.is_even()
    if step.kind == ALL_GATHER:
        return (all_gather_move if even else padded_all_gather_move)(step, mesh_info, dtype)
    if step.kind == REDUCE_SCATTER and reduces_natively(dtype, step.op):
        return (reduce_scatter_move if even else padded_reduce_scatter_move)(step, mesh_info, dtype)
    if step.kind == ALL_TO_ALL and even:
        return all_to_all_move(step, mesh_info, dtype)
    return exchange_move(step, mesh_info, dtype)
