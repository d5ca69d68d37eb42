"""Batch norm with the batch cut: the statistics are those of the whole batch.

PyTorch has many ops for it, some of which write running statistics without saying so in their schemas. All of them are
expressed by three: with given statistics, with those of the batch, and the one that returns new running statistics.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .call import Call
from .kernel import Cut, Kernel, KernelRun, LocalCall, Reduce
from .norm import kernel_clause
from .norm_kernels import _cast
from .reduce_kernels import moments, wide
from .tables import INSTEAD, LOCAL, register

aten = torch.ops.aten
_TRAFFIC = 0.04


def _operand(call: Call, kernel: bool) -> tuple[str, str]:
    """The operand, its channels in dim 1, and the clause for the dims that are normalized together."""
    others = [f"k{dim}" for dim in range(call.ndim(0)) if dim != 1]
    text = " ".join([others[0], "c", *others[1:]])
    return text, kernel_clause(others) if kernel else ""


def _joined(*clauses: str) -> str:
    return " ; ".join(filter(None, clauses))


def training(call: Call) -> str:
    """The rule of the ops that normalize by the statistics of the batch; `functional` ones return running ones."""
    operand, kernel = _operand(call, call.arg("training", True))
    given = len(call.tensors) - 1
    results = 5 if given == 4 else 3
    channels = ", ".join(["c"] * given)
    return _joined(f"{operand}, {channels} -> {operand}{', c' * (results - 1)}", "reduce none", kernel)


def _others(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _channels(x: Tensor, like: Tensor) -> Tensor:
    return x.view(-1, *[1] * (like.dim() - 2))


def batch_norm(call: LocalCall, cut: Cut) -> KernelRun:
    """Normalized by the statistics of the whole batch."""
    x, dims = call["input"], _others(call["input"])
    x = x.to(wide(x.dtype))
    whole = math.prod(call.given[0].shape[dim] for dim in dims)
    center, squares = yield from moments(x, dims, whole, cut)
    rstd = (squares / whole + call["eps"]).rsqrt()
    result = (x - center) * rstd
    if call["weight"] is not None:
        result = result * _channels(call["weight"], x)
    if call["bias"] is not None:
        result = result + _channels(call["bias"], x)
    center, rstd = center.flatten(), rstd.flatten()
    results = [result, center, rstd]
    if "running_mean" in call.arguments:
        new = (center, squares.flatten() / max(1, whole - 1))
        for name, statistic in zip(("running_mean", "running_var"), new, strict=True):
            results.append(torch.lerp(call[name].to(statistic.dtype), statistic, call["momentum"]))
    return _cast(results, call.dtypes)


def backward_rule(call: Call) -> str:
    """The rule of the gradients: their sums over the batch are completed only where statistics were of the batch."""
    train = call.arg("train")
    operand, kernel = _operand(call, train)
    saved = "c, c" if train else "_, _"  # nothing is saved where statistics are given
    sides = f"{operand}, {operand}, c, c, c, {saved} -> {operand}, c, c"
    return _joined(sides, "linear 0", "reduce none" if train else "", kernel)


def batch_norm_backward(call: LocalCall, cut: Cut) -> KernelRun:
    """The gradients, of which two sums for each channel are exchanged."""
    gradient, x = (call[name].to(wide(call[name].dtype)) for name in ("grad_out", "input"))
    dims = _others(x)
    rstd = _channels(call["save_invstd"], x)
    unit = (x - _channels(call["save_mean"], x)) * rstd
    sums = yield Reduce(torch.stack([gradient.sum(dims), (gradient * unit).sum(dims)]))
    whole = math.prod(call.given[0].shape[dim] for dim in dims)
    along, across = (_channels(part, x) for part in sums / whole)
    scale = rstd if call["weight"] is None else rstd * _channels(call["weight"], x)
    wanted = ((gradient - along - unit * across) * scale, sums[1], sums[0])
    asked = zip(wanted, call["output_mask"], strict=True)
    return _cast([result if given else None for result, given in asked], call.dtypes)


def backward_local(call: LocalCall) -> Any:
    """Channels apart from each other; with given statistics elements too, but for the sums over them."""
    gradient, x = call["grad_out"], call["input"]
    if call["train"] and x.numel():
        return call.run()
    mean, rstd = (torch.zeros_like(x[:0].flatten()),) * 2
    if not call["train"]:
        mean, rstd = call["running_mean"], (call["running_var"] + call["eps"]).rsqrt()
    elif x.shape[1]:
        mean, rstd = call["save_mean"], call["save_invstd"]
    unit = (x - _channels(mean, x)) * _channels(rstd, x)
    scale = rstd if call["weight"] is None else rstd * call["weight"]
    dims = _others(x)
    wanted = (gradient * _channels(scale, x), (gradient * unit).sum(dims), gradient.sum(dims))
    asked = zip(wanted, call["output_mask"], strict=True)
    return _cast([result if given else None for result, given in asked], call.dtypes)


def given_statistics(call: LocalCall) -> Any:
    """Normalized by running statistics. Others are not saved, though the op's metadata may tell of some."""
    x = call["input"]
    result = call.run()[0] if x.numel() else torch.zeros_like(x)
    return result, *(x.new_zeros(call.local_shape(i), dtype=call.dtypes[i]) for i in (1, 2))


LOCAL["aten::native_batch_norm_backward"] = backward_local
LOCAL["aten::_native_batch_norm_legit_no_training"] = given_statistics
for _name in ("_native_batch_norm_legit.no_stats", "_native_batch_norm_legit_functional"):
    register(f"aten::{_name}", training, {"k": Kernel(batch_norm, traffic=_TRAFFIC, joint=True)})
register(
    "aten::native_batch_norm_backward", backward_rule, {"k": Kernel(batch_norm_backward, traffic=_TRAFFIC, joint=True)}
)


# ---- the other ops, by these ----------------------------------------------------------------------------------------


def _whole(x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float) -> Any:
    """Any batch norm; running statistics that are given are updated once, by the statistics of the whole batch."""
    if not training:
        results = aten._native_batch_norm_legit_no_training(x, weight, bias, mean, var, momentum, eps)
        # On the CPU nothing is saved, though the op's metadata tell of statistics.
        return results if x.device.type != "cpu" else (results[0], *(t.new_empty(0) for t in results[1:]))
    if mean is None:
        return aten._native_batch_norm_legit.no_stats(x, weight, bias, True, momentum, eps)
    *results, new_mean, new_var = aten._native_batch_norm_legit_functional(
        x, weight, bias, mean, var, True, momentum, eps
    )
    mean.copy_(new_mean)
    var.copy_(new_var)
    return tuple(results)


def _into(*args: Any, out: Any, save_mean: Any, save_invstd: Any) -> Any:
    outs = (out, save_mean, save_invstd)
    for target, result in zip(outs, _whole(*args), strict=True):
        target.copy_(result)
    return outs


def _with_reserve(results: Sequence[Any]) -> tuple[Any, ...]:
    return (*results, results[0].new_empty(0, dtype=torch.uint8))


def _with_update(x: Any, weight: Any, bias: Any, mean: Any, var: Any, momentum: float, eps: float) -> Any:
    return _with_reserve(_whole(x, weight, bias, mean, var, True, momentum, eps))


def _no_update(x: Any, weight: Any, bias: Any, mean: Any, var: Any, momentum: float, eps: float) -> Any:
    return _with_reserve(_whole(x, weight, bias, mean, var, False, momentum, eps))


def _cudnn(*args: Any, **kwargs: Any) -> Any:
    return _with_reserve(_whole(*args, **kwargs))


def _cudnn_backward(
    x: Any, gradient: Any, weight: Any, mean: Any, var: Any, save_mean: Any, save_rstd: Any, eps: float, reserve: Any
) -> Any:
    mask = [True, True, True]
    return aten.native_batch_norm_backward(gradient, x, weight, mean, var, save_mean, save_rstd, True, eps, mask)


def _backward(
    gradient: Any, x: Any, weight: Any, mean: Any, var: Any, save_mean: Any, save_rstd: Any, update: bool, eps: float,
    mask: Any, reserve: Any,
) -> Any:  # fmt: skip
    return aten.native_batch_norm_backward(gradient, x, weight, mean, var, save_mean, save_rstd, update, eps, mask)


INSTEAD.update(
    {
        "aten::native_batch_norm.default": _whole,
        "aten::native_batch_norm.out": _into,
        "aten::_native_batch_norm_legit.default": _whole,
        "aten::_native_batch_norm_legit.out": _into,
        "aten::_batch_norm_with_update.default": _with_update,
        "aten::_batch_norm_no_update.default": _no_update,
        "aten::batch_norm_backward.default": _backward,
        "aten::cudnn_batch_norm.default": _cudnn,
        "aten::cudnn_batch_norm_backward.default": _cudnn_backward,
        "aten::miopen_batch_norm.default": _whole,
    }
)
