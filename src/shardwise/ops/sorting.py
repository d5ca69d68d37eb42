"""Sorting, the k largest, medians and unique elements along a dim."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..notation.build import dims_text, normalized, replicated_dims
from .call import Call
from .kernel import FactorShard, Kernel, KernelRun, LocalCall
from .registry import definitions_in
from .scan import gather_both, slab

define = definitions_in(__name__)

# ---- the k largest --------------------------------------------------------------------------------------------------


def topk_rule(call: Call) -> str:
    """Return the rule: the k largest along a dim, which has a kernel."""
    ndim = call.ndim(0)
    dims = normalized(ndim, call.arg("dim"))
    operand, result = (dims_text("x", ndim, dict.fromkeys(dims, mark)) for mark in ("k", "_"))
    return f"{operand} -> {result}, {result}" + (" ; reduce none ; kernel k" if dims else "")


def topk(call: LocalCall, shard: FactorShard) -> KernelRun:
    """Find the k largest, or smallest, among those of all ranks."""
    x, dim, k, largest = call["self"], call.dims[0] or 0, call["k"], call["largest"]
    held = [min(k, stop - start) for start, stop in shard.bounds]
    most = max(held)
    values, places = x.topk(min(k, shard.held), dim, largest)
    room = slab(call, most - values.shape[dim])
    places = places + shard.start
    padded = [torch.cat([found, found.new_zeros(room)], dim) for found in (values, places)]
    every_value, every_place = yield from gather_both(*padded)

    def joined(pieces: Tensor) -> Tensor:
        return torch.cat([piece.narrow(dim, 0, n) for piece, n in zip(pieces, held, strict=True)], dim)

    best, which = joined(every_value).topk(k, dim, largest, call["sorted"])
    return best, joined(every_place).gather(dim, which)


SCATTERS_INTO_ZEROS = torch.__version__ < (2, 13)  # type: ignore[operator]  # versions of PyTorch compare with tuples
"""Whether PyTorch's derivative of picking elements along a dim scatters the gradient into zeros that it makes."""

define("aten::topk", topk_rule, kernels={"k": Kernel(topk, traffic=4.0)}, derivative_makes_tensors=SCATTERS_INTO_ZEROS)

# ---- along a replicated dim -----------------------------------------------------------------------------------------


def along(ndim: int, dim: int, outputs: int, keepdim: bool | None = None) -> str:
    """Return the rule of an op along one dim, which must be replicated; `keepdim` is None if the results keep the dim.

    >>> along(2, 1, 2), along(2, -1, 1, False)
    ('x0 [x1] -> x0 [x1], x0 [x1]', 'x0 [x1] -> x0')
    """
    operand = replicated_dims("x", ndim, dim)
    result = operand
    if keepdim is not None:
        result = dims_text("x", ndim, dict.fromkeys(normalized(ndim, dim), "1" if keepdim else ""))
    return f"{operand} -> {', '.join([result] * outputs)}"


def along_dim(outputs: int) -> Callable[[Call], str]:
    """Return the rule of ops that reorder a dim."""
    return lambda call: along(call.ndim(0), call.arg("dim"), outputs)


def picked_from_dim(call: Call) -> str:
    """Return the rule: ops that find one element along a dim: its value and its index."""
    return along(call.ndim(0), call.arg("dim"), 2, call.arg("keepdim"))


define("aten::sort", along_dim(2), derivative_makes_tensors=SCATTERS_INTO_ZEROS)
define("aten::argsort", along_dim(1))
define("aten::msort", "[k] x.. -> [k] x..")
define(
    ("aten::kthvalue", "aten::mode", "aten::median.dim", "aten::nanmedian.dim"),
    picked_from_dim,
    derivative_makes_tensors=SCATTERS_INTO_ZEROS,
)
define(("aten::quantile", "aten::nanquantile"), makes_tensors=True)
define(("aten::median.default", "aten::nanmedian.default"), "[x..] -> ")

# ---- results whose shape depends on data: every rank computes on gathered inputs ------------------------------------

define("aten::bincount", "[x..], [x..] -> _")
define("aten::_unique", "[x..] -> _, _..")
define("aten::_unique2", "[x..] -> _, _.., _..")
define("aten::unique_dim", "[x..] -> _.., _, _")
define("aten::unique_consecutive", "[x..] -> _.., _.., _")
