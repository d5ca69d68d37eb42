"""Vector norms: powers of the norms of all shards are summed over ranks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..notation.build import join, kernel_clause
from .call import Call
from .kernel import FactorShard, Kernel, KernelRun, LocalCall, Reduce, Steps
from .reduce import merged, over, wide
from .registry import definitions_in

define = definitions_in(__name__)


def _order(call: LocalCall) -> float:
    for name in ("ord", "p"):
        if call.arguments.get(name) is not None:
            return float(call.arguments[name])
    return 2.0


def merge_norms(local: Tensor, order: float) -> Steps[Tensor]:
    """Return the norm of a vector from the norms of its shards."""
    if math.isinf(order):
        return (yield Reduce(local, "max" if order > 0 else "min"))
    if order in (0.0, 1.0):
        return (yield Reduce(local))
    powers = yield Reduce(local.square() if order == 2.0 else local.pow(order))
    return powers.sqrt() if order == 2.0 else powers.pow(1 / order)


def _local_norm(x: Tensor, order: float, dims: list[int], keepdim: bool, result: torch.dtype) -> Tensor:
    """Return the norm of the local shard, in a dtype in which norms can be added up."""
    dtype = wide(result) if not x.is_complex() else None
    shape = [1 if dim in dims else size for dim, size in enumerate(x.shape) if keepdim or dim not in dims]
    if any(x.shape[dim] == 0 for dim in dims):
        # An empty shard must not change the norm: 0 for orders from 0 on, infinity for negative ones.
        return x.new_full(shape, 0.0 if order >= 0 else math.inf, dtype=wide(result))
    return torch.linalg.vector_norm(x, order, dims, keepdim, dtype=dtype).to(wide(result))


def norm_rule(call: Call) -> str:
    """Return the rule: a norm over some dims, or all."""
    return merged(call.ndim(0), call.arg("dim", None), call.arg("keepdim", False))


def norm(call: LocalCall, shard: FactorShard) -> KernelRun:
    """Merge the norms of all shards."""
    x, order = call["self"], _order(call)
    local = _local_norm(x, order, over(call), bool(call.arguments.get("keepdim")), call.dtypes[0])
    return (yield from merge_norms(local, order)).to(call.dtypes[0])


def distance_rule(call: Call) -> str:
    """Return the rule: the norm of a difference, of tensors that may broadcast."""
    ndim = max(call.ndim(0), call.ndim(1))
    dims = [f"k{dim}" for dim in range(ndim)]
    sides = [" ".join(f"{dim}?" for dim in dims[ndim - call.ndim(i) :]) for i in (0, 1)]
    return join(f"{', '.join(sides)} ->", "reduce none", kernel_clause(dims))


def distance(call: LocalCall, shard: FactorShard) -> KernelRun:
    """Merge the norms of all shards of a difference."""
    apart, order = call["self"] - call["other"], _order(call)
    local = _local_norm(apart, order, list(range(apart.dim())), False, call.dtypes[0])
    return (yield from merge_norms(local, order)).to(call.dtypes[0])


define(("aten::linalg_vector_norm", "aten::norm"), norm_rule, kernels={"k": Kernel(norm, joint=True)})
define("aten::dist", distance_rule, kernels={"k": Kernel(distance, joint=True)})
