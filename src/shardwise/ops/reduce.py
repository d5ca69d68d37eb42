"""Reductions: on a sharded dim, each rank's result is one operand of the same reduction over ranks.

Reductions for which this does not hold are completed by kernels: variances in `variance`, norms in `vector_norm`, the
index of an extreme in `extremes`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..notation.build import dims_text, join, kernel_clause, normalized, reduction, replicated_dims
from .call import Call
from .kernel import LocalCall, LocalResult
from .modes import switched
from .op import Local
from .registry import definitions_in

define = definitions_in(__name__)


def reduced_dims(ndim: int, dims: int | Sequence[int] | None) -> list[int]:
    """Return the dims that a reduction with this argument goes over: all of them for None and for an empty list."""
    return normalized(ndim, dims) or list(range(ndim))


def merged(ndim: int, dims: int | Sequence[int] | None, keepdim: bool = False, outputs: int = 1) -> str:
    """Return the rule of a reduction that a kernel completes over those of these dims that are sharded.

    >>> merged(3, [0, 2])
    'k0 x1 k2 -> x1 ; reduce none ; kernel k0, k2'
    """
    over = reduced_dims(ndim, dims)
    operand = dims_text("x", ndim, {dim: f"k{dim}" for dim in over})
    result = dims_text("x", ndim, dict.fromkeys(over, "1" if keepdim else ""))
    kernel = kernel_clause([f"k{dim}" for dim in over])
    return join(f"{operand} -> {', '.join([result] * outputs)}".strip(), "reduce none" if over else "", kernel)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums of this dtype are computed: float32 for narrower floats."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def over(call: LocalCall, name: str = "dim") -> list[int]:
    """Return the dims that a call reduces over."""
    return reduced_dims(len(call.given[0].dims), call.arguments.get(name))


def counts(call: LocalCall, dims: list[int], local: Tensor) -> tuple[int, int]:
    """Return the number of elements that each result is reduced from: on this rank, and globally."""
    return math.prod(local.shape[dim] for dim in dims), math.prod(call.given[0].shape[dim] for dim in dims)


# ---- by an op that Partial supports ---------------------------------------------------------------------------------


def reduce_by(op: str, linear: bool = True) -> Callable[[Call], str]:
    """Return the rule of reductions by an op that Partial supports."""

    def rule(call: Call) -> str:
        return reduction(call.ndim(0), call.arg("dim", None), call.arg("keepdim", False), op, linear)

    return rule


def truth(op: str) -> Callable[[Call], str]:
    """Return the rule of `any` and `all`: over no dims at all they only cast."""
    reduces = reduce_by(op, linear=False)
    return lambda call: "x.. -> x.." if call.arg("dim", None) in ((), []) else reduces(call)


def min_and_max(call: Call) -> str:
    """Return the rule: `aminmax`: two reductions at once."""
    text = reduction(call.ndim(0), call.arg("dim"), call.arg("keepdim"), linear=False)
    operand, _, result = text.partition("->")
    return f"{operand}-> {result}, {result} ; reduce min, max"


define("aten::sum", reduce_by("sum"))
define(("aten::nansum", "aten::count_nonzero"), reduce_by("sum", linear=False))
define("aten::prod", reduce_by("product"), derivative_makes_tensors=True)
define(("aten::amax", "aten::max.default"), reduce_by("max"))
define(("aten::amin", "aten::min.default"), reduce_by("min"))
define("aten::max.other", "b?.., b?.. -> b.. ; monotone 0+1 ; reduce max")
define("aten::min.other", "b?.., b?.. -> b.. ; monotone 0+1 ; reduce min")
define("aten::any", truth("max"))
define("aten::all", truth("min"))
define("aten::aminmax", min_and_max)

# ---- means ----------------------------------------------------------------------------------------------------------


def mean(call: LocalCall) -> LocalResult:
    """Return the mean of the local shard, times the rank's share of the elements.

    The sum over ranks is the global mean.
    """
    x, dims = call["self"], over(call)
    here, everywhere = counts(call, dims, x)
    if here == everywhere:
        return call.run()
    if here == 0:
        return x.new_zeros(call.local_shape(), dtype=call.dtypes[0])
    local = x.mean(dims, bool(call.arguments.get("keepdim")), dtype=wide(call.dtypes[0]))
    return local.mul_(here / everywhere).to(call.dtypes[0])


define("aten::mean", reduce_by("sum"), local=Local(mean, when="partial sum"))

# ---- over replicated dims -------------------------------------------------------------------------------------------


def over_replicated_dims(call: Call) -> str:
    """Return the rule: reductions that Partial does not support: dims that they reduce over must be replicated."""
    ndim, over = call.ndim(0), reduced_dims(call.ndim(0), call.arg("dim"))
    result = dims_text("x", ndim, dict.fromkeys(over, "1" if call.arg("keepdim") else ""))
    return f"{replicated_dims('x', ndim, over)} -> {result}"


define("aten::hash_tensor", over_replicated_dims)
define("aten::_local_scalar_dense", "[x..] -> ")

# ---- one answer for all elements ------------------------------------------------------------------------------------


def equal(one: Tensor, other: Tensor) -> bool:
    """Return whether all elements are equal: ranks exchange one bit each, not the tensors.

    With a plain tensor, each rank compares its local shard with the same part of its own plain tensor.
    """
    if one.shape != other.shape:
        return False
    with switched(implicit_replication=True):
        return bool((one == other).all().item())


def close(one: Tensor, other: Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> bool:
    """Return whether all elements are equal up to a tolerance."""
    return bool(torch.isclose(one, other, rtol, atol, equal_nan).all().item())


def same_shape(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same global shape."""
    return one.shape == other.shape


define("aten::equal", decomposition=equal, takes_plain=True)
define("aten::allclose", decomposition=close)
define(("aten::is_same_size", "aten::_has_same_storage_numel"), decomposition=same_shape, takes_plain=True)
