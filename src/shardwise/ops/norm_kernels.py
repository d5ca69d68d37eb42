"""Layer norm and its likes over cut dims: statistics of the parts, merged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .call import Call
from .kernel import Cut, Kernel, KernelRun, LocalCall, Reduce
from .norm import kernel_clause, normalized_dims
from .reduce_kernels import moments, wide
from .tables import COPES_WITH_EMPTY, KEEPS_SIZES, LOCAL, register

# Statistics are small next to what is normalized.
_TRAFFIC = 0.04


def _last(call: LocalCall) -> list[int]:
    ndim = len(call.given[0].dims)
    return list(range(ndim - len(call["normalized_shape"]), ndim))


def _count(call: LocalCall, dims: Sequence[int]) -> int:
    return math.prod(call.given[0].shape[dim] for dim in dims)


def _cast(results: Sequence[Tensor | None], dtypes: Sequence[torch.dtype]) -> tuple[Tensor | None, ...]:
    """Results in the dtypes of the op's; None where they were not asked for."""
    remaining = iter(dtypes)
    return tuple(None if result is None else result.to(next(remaining)) for result in results)


def layer_norm_rule(call: Call) -> str:
    """The last dims are normalized together, with a kernel where they are cut."""
    operand, last, statistic = normalized_dims(call.ndim(0), len(call.arg("normalized_shape")))
    sides = f"{operand}, {last}, {last} -> {operand}, {statistic}, {statistic}"
    return f"{sides} ; reduce none ; normalized_shape=({last}) ; {kernel_clause(last)}"


def layer_norm(call: LocalCall, cut: Cut) -> KernelRun:
    """Normalized by the statistics of all pieces."""
    x, dims = call["input"], _last(call)
    x = x.to(wide(x.dtype))
    whole = _count(call, dims)
    center, squares = yield from moments(x, dims, whole, cut)
    rstd = (squares / whole + call["eps"]).rsqrt()
    result = (x - center) * rstd
    if call["weight"] is not None:
        result = result * call["weight"]
    if call["bias"] is not None:
        result = result + call["bias"]
    return result.to(call.dtypes[0]), *(x.to(_statistic_dtype(call)) for x in (center, rstd))


def _statistic_dtype(call: LocalCall) -> torch.dtype:
    """The dtype in which the op saves statistics: on CPU that of its input, unless its parameters have another."""
    x, parameters = call["input"], (call["weight"], call["bias"])
    mixed = any(p is not None and p.dtype != x.dtype for p in parameters)
    return x.dtype if x.device.type == "cpu" and not mixed else call.dtypes[1]


def layer_norm_backward_rule(call: Call) -> str:
    """The gradients of parameters are sums over all rows."""
    operand, last, statistic = normalized_dims(call.ndim(0), len(call.arg("normalized_shape")))
    sides = f"{operand}, {operand}, {statistic}, {statistic}, {last}, {last} -> {operand}, {last}, {last}"
    return f"{sides} ; linear 0 ; normalized_shape=({last}) ; {kernel_clause(last)}"


def layer_norm_backward(call: LocalCall, cut: Cut) -> KernelRun:
    """The gradients, of which two sums for each row are exchanged."""
    dims = _last(call)
    gradient, x = (call[name].to(wide(call[name].dtype)) for name in ("grad_out", "input"))
    unit = (x - call["mean"]) * call["rstd"]
    scaled = gradient if call["weight"] is None else gradient * call["weight"]
    sums = yield Reduce(torch.stack([scaled.sum(dims, True), (scaled * unit).sum(dims, True)]))
    whole = _count(call, dims)
    along, across = sums / whole
    to_input = call["rstd"] * (scaled - along - unit * across)
    return _for_layer(call, to_input, gradient, unit, dims)


def _for_layer(call: LocalCall, to_input: Tensor, gradient: Tensor, unit: Tensor, dims: Sequence[int]) -> Any:
    """The gradients that were asked for: of the input, the weight and the bias."""
    batch = list(range(dims[0]))

    def total(x: Tensor) -> Tensor:
        return x.sum(batch) if batch else x

    mask = call["output_mask"]
    wanted = (to_input, total(gradient * unit), total(gradient))
    return _cast([result if asked else None for result, asked in zip(wanted, mask, strict=False)], call.dtypes)


def rms_norm_rule(call: Call) -> str:
    """As for `layer_norm`, with one statistic."""
    operand, last, statistic = normalized_dims(call.ndim(0), len(call.arg("normalized_shape")))
    sides = f"{operand}, {last} -> {operand}, {statistic}"
    return f"{sides} ; reduce none ; normalized_shape=({last}) ; {kernel_clause(last)}"


def rms_norm(call: LocalCall, cut: Cut) -> KernelRun:
    """Normalized by the mean square of all pieces."""
    x, dims = call["input"], _last(call)
    eps = torch.finfo(x.dtype).eps if call["eps"] is None else call["eps"]
    x = x.to(wide(x.dtype))
    squares = yield Reduce(x.square().sum(dims, True))
    rstd = (squares / _count(call, dims) + eps).rsqrt()
    result = x * rstd
    if call["weight"] is not None:
        result = result * call["weight"]
    return _cast((result, rstd), call.dtypes)


def rms_norm_backward_rule(call: Call) -> str:
    """As for `layer_norm`, with one statistic."""
    operand, last, statistic = normalized_dims(call.ndim(0), len(call.arg("normalized_shape")))
    sides = f"{operand}, {operand}, {statistic}, {last} -> {operand}, {last}"
    return f"{sides} ; linear 0 ; normalized_shape=({last}) ; {kernel_clause(last)}"


def rms_norm_backward(call: LocalCall, cut: Cut) -> KernelRun:
    """The gradients, of which one sum for each row is exchanged."""
    dims = _last(call)
    gradient, x = (call[name].to(wide(call[name].dtype)) for name in ("grad_out", "input"))
    unit = x * call["rstd"]
    scaled = gradient if call["weight"] is None else gradient * call["weight"]
    across = (yield Reduce((scaled * unit).sum(dims, True))) / _count(call, dims)
    return _for_layer(call, call["rstd"] * (scaled - unit * across), gradient, unit, dims)[:2]


def _contiguous(call: LocalCall) -> Any:
    """The op itself, for ops that want their operands contiguous, and something in them."""
    tensors = {name: x for name, x in call.arguments.items() if isinstance(x, Tensor)}
    if all(x.numel() for x in tensors.values()):
        return call.run(**{name: x.contiguous() for name, x in tensors.items()})
    like = next(iter(tensors.values()))
    made = (like.new_zeros(call.local_shape(i), dtype=dtype) for i, dtype in enumerate(call.dtypes))
    asked = call.arguments.get("output_mask") or [True] * len(call.dtypes)
    return tuple(next(made) if wanted else None for wanted in asked)


for _name in ("native_group_norm", "_weight_norm_interface"):
    LOCAL[f"aten::{_name}"] = LOCAL[f"aten::{_name}_backward"] = _contiguous

for _name, _rule, _run in (
    ("native_layer_norm", layer_norm_rule, layer_norm),
    ("native_layer_norm_backward", layer_norm_backward_rule, layer_norm_backward),
    ("_fused_rms_norm", rms_norm_rule, rms_norm),
    ("_fused_rms_norm_backward", rms_norm_backward_rule, rms_norm_backward),
):
    register(f"aten::{_name}", _rule, {"k": Kernel(_run, traffic=_TRAFFIC, joint=True)})
# On CPU they save statistics in another dtype than on meta.
COPES_WITH_EMPTY |= {"aten::native_layer_norm", "aten::native_layer_norm_backward"}
KEEPS_SIZES |= {"aten::native_layer_norm", "aten::native_layer_norm_backward"}
