"""Batch norm with a sharded batch: the statistics are those of the global batch.

PyTorch has many ops for it; the schemas of some do not declare that they write running statistics. All of them are
decomposed into three, which normalize by given statistics, by those of the batch, or by those of the batch with new
running statistics as results.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..notation.build import join, kernel_clause
from .call import Call
from .channels import dims_but_channels, per_channel
from .kernel import FactorShard, Kernel, KernelRun, LocalCall, LocalResult, Reduce
from .norm import TRAFFIC, cast_results
from .op import Local
from .reduce import wide
from .registry import definitions_in
from .variance import moments

define = definitions_in(__name__)
aten = torch.ops.aten


def _operand(call: Call, with_kernel: bool) -> tuple[str, str]:
    """Return the pattern of the operand, its channels in dim 1, and the clause for dims normalized together."""
    others = [f"k{dim}" for dim in range(call.ndim(0)) if dim != 1]
    text = " ".join([others[0], "c", *others[1:]])
    return text, kernel_clause(others) if with_kernel else ""


# ---- with the statistics of the batch -------------------------------------------------------------------------------


def _training_rule(call: Call) -> str:
    """Return the rule of the ops that normalize by the statistics of the batch.

    `_native_batch_norm_legit_functional`, which has four operands beside the input, returns new running statistics.
    """
    operand, kernel = _operand(call, call.arg("training", True))
    others = len(call.tensors) - 1
    statistics = 4 if others == 4 else 2
    return join(f"{operand}{', c' * others} -> {operand}{', c' * statistics}", "reduce none", kernel)


def batch_norm(call: LocalCall, shard: FactorShard) -> KernelRun:
    """Normalize by the statistics of the global batch."""
    x, dims = call["input"], dims_but_channels(call["input"])
    x = x.to(wide(x.dtype))
    count = math.prod(call.given[0].shape[dim] for dim in dims)
    center, squares = yield from moments(x, dims, count, shard)
    rstd = (squares / count + call["eps"]).rsqrt()
    result = (x - center) * rstd
    if call["weight"] is not None:
        result = result * per_channel(call["weight"], x)
    if call["bias"] is not None:
        result = result + per_channel(call["bias"], x)
    center, rstd = center.flatten(), rstd.flatten()
    results = [result, center, rstd]
    if "running_mean" in call.arguments:
        new = (center, squares.flatten() / max(1, count - 1))
        for name, statistic in zip(("running_mean", "running_var"), new, strict=True):
            results.append(torch.lerp(call[name].to(statistic.dtype), statistic, call["momentum"]))
    return cast_results(results, call.dtypes)


def _local_batch_norm(call: LocalCall) -> LocalResult:
    """Run the op where no sharded factor has a kernel, and cast: on CPUs its meta kernel returns other dtypes."""
    if not call["input"].numel():
        return tuple(call.zeros(call["input"], result) for result in range(len(call.dtypes)))
    return cast_results(call.run(), call.dtypes)


define(
    ("aten::_native_batch_norm_legit.no_stats", "aten::_native_batch_norm_legit_functional"),
    _training_rule,
    kernels={"k": Kernel(batch_norm, traffic=TRAFFIC, joint=True)},
    strides="batch norm",
    local=Local(_local_batch_norm),
)


# ---- with given statistics ------------------------------------------------------------------------------------------


def _with_given_statistics(call: LocalCall) -> tuple[Tensor, ...]:
    """Normalize by running statistics. The saved statistics are not used: zeros of the sizes that the rule gives."""
    x: Tensor = call["input"]
    result = call.run()[0] if x.numel() else torch.zeros_like(x)
    return result, call.zeros(x, 1), call.zeros(x, 2)


# With given statistics a normalization is elementwise.
define(
    "aten::_native_batch_norm_legit_no_training",
    "n c s.., c, c, c, c -> n c s.., _, _",
    local=Local(_with_given_statistics),
    strides="batch norm",
)


# ---- gradients ------------------------------------------------------------------------------------------------------


def _backward_rule(call: Call) -> str:
    """Return the rule of the gradients.

    Their sums over the batch are needed locally only if they enter the statistics.
    """
    train = call.arg("train")
    operand, kernel = _operand(call, train)
    saved = "c, c" if train else "_, _"  # with given statistics nothing is saved
    sides = f"{operand}, {operand}, c, c, c, {saved} -> {operand}, c, c"
    return join(sides, "linear 0", "reduce none" if train else "", kernel)


def _requested(call: LocalCall, *gradients: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients that the caller requested, in the dtypes of the op's results."""
    wanted = zip(gradients, call["output_mask"], strict=True)
    return cast_results([gradient if asked else None for gradient, asked in wanted], call.dtypes)


def batch_norm_backward(call: LocalCall, shard: FactorShard) -> KernelRun:
    """Compute the gradients; two sums for each channel are reduced."""
    gradient, x = (call[name].to(wide(call[name].dtype)) for name in ("grad_out", "input"))
    dims = dims_but_channels(x)
    rstd = per_channel(call["save_invstd"], x)
    x_hat = (x - per_channel(call["save_mean"], x)) * rstd
    sums = yield Reduce(torch.stack([gradient.sum(dims), (gradient * x_hat).sum(dims)]))
    count = math.prod(call.given[0].shape[dim] for dim in dims)
    mean, mean_product = (per_channel(total, x) for total in sums / count)
    scale = rstd if call["weight"] is None else rstd * per_channel(call["weight"], x)
    return _requested(call, (gradient - mean - x_hat * mean_product) * scale, sums[1], sums[0])


def _local_backward(call: LocalCall) -> tuple[Tensor | None, ...]:
    """Compute the gradients where no sharded factor has a kernel.

    The op runs where it can: not on empty shards, nor in eval mode, where no statistics were saved.
    """
    gradient, x = call["grad_out"], call["input"]
    if call["train"] and x.numel():
        weight = call["weight"]
        dtype = x.dtype if weight is None else weight.dtype  # in which CPUs take the statistics
        dtype = dtype if x.device.type == "cpu" else call["save_mean"].dtype
        saved = {name: call[name].to(dtype) for name in ("save_mean", "save_invstd")}
        return cast_results(call.run(**saved), call.dtypes)
    mean, rstd = (torch.zeros_like(x[:0].flatten()),) * 2
    if not call["train"]:
        mean, rstd = call["running_mean"], (call["running_var"] + call["eps"]).rsqrt()
    elif x.shape[1]:
        mean, rstd = call["save_mean"], call["save_invstd"]
    x_hat = (x - per_channel(mean, x)) * per_channel(rstd, x)
    scale = rstd if call["weight"] is None else rstd * call["weight"]
    dims = dims_but_channels(x)
    return _requested(call, gradient * per_channel(scale, x), (gradient * x_hat).sum(dims), gradient.sum(dims))


define(
    "aten::native_batch_norm_backward",
    _backward_rule,
    kernels={"k": Kernel(batch_norm_backward, traffic=TRAFFIC, joint=True)},
    local=Local(_local_backward),
    strides="batch norm backward",
    masks_results=True,
)


# ---- the other ops, decomposed into these ---------------------------------------------------------------------------

Given = Tensor | None


def _any_batch_norm(
    x: Tensor, weight: Given, bias: Given, mean: Given, var: Given, training: bool, momentum: float, eps: float
) -> tuple[Tensor, ...]:
    """Run any batch norm by the ops above. Running statistics are updated once, by those of the global batch."""
    if not training:
        results = aten._native_batch_norm_legit_no_training(x, weight, bias, mean, var, momentum, eps)
        # On the CPU nothing is saved, though the op's metadata have statistics.
        return results if x.device.type != "cpu" else (results[0], *(t.new_empty(0) for t in results[1:]))
    if mean is None or var is None:
        return aten._native_batch_norm_legit.no_stats(x, weight, bias, True, momentum, eps)
    *results, new_mean, new_var = aten._native_batch_norm_legit_functional(
        x, weight, bias, mean, var, True, momentum, eps
    )
    mean.copy_(new_mean)
    var.copy_(new_var)
    return tuple(results)


def _into(
    x: Tensor, weight: Given, bias: Given, mean: Given, var: Given, training: bool, momentum: float, eps: float,
    *, out: Tensor, save_mean: Tensor, save_invstd: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Write the results into `out`, `save_mean` and `save_invstd`."""
    outs = (out, save_mean, save_invstd)
    results = _any_batch_norm(x, weight, bias, mean, var, training, momentum, eps)
    for target, result in zip(outs, results, strict=True):
        target.copy_(result)
    return outs


def _with_reserve(results: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the results and an empty reserve, in which a backend may save data for its own backward; not used here."""
    return (*results, results[0].new_empty(0, dtype=torch.uint8))


def _with_update(
    x: Tensor, weight: Given, bias: Given, mean: Given, var: Given, momentum: float, eps: float
) -> tuple[Tensor, ...]:
    """Return the results of batch norm in training, by the variant of the op that the device runs."""
    return _with_reserve(_any_batch_norm(x, weight, bias, mean, var, True, momentum, eps))


def _no_update(
    x: Tensor, weight: Given, bias: Given, mean: Given, var: Given, momentum: float, eps: float
) -> tuple[Tensor, ...]:
    """Return the results of batch norm in evaluation, by the running statistics."""
    return _with_reserve(_any_batch_norm(x, weight, bias, mean, var, False, momentum, eps))


def _cudnn(
    x: Tensor, weight: Given, bias: Given, mean: Given, var: Given, training: bool, momentum: float, eps: float
) -> tuple[Tensor, ...]:
    """Return the results of cuDNN's op, by the variant of batch norm that the device runs."""
    return _with_reserve(_any_batch_norm(x, weight, bias, mean, var, training, momentum, eps))


def _cudnn_backward(
    x: Tensor, gradient: Tensor, weight: Given, mean: Given, var: Given, save_mean: Given, save_rstd: Given,
    eps: float, reserve: Tensor,
) -> tuple[Given, ...]:  # fmt: skip
    """Return the gradients of cuDNN's batch norm, by `native_batch_norm_backward`."""
    mask = [True, True, True]
    return aten.native_batch_norm_backward(gradient, x, weight, mean, var, save_mean, save_rstd, True, eps, mask)


def _backward(
    gradient: Tensor, x: Tensor, weight: Given, mean: Given, var: Given, save_mean: Given, save_rstd: Given,
    update: bool, eps: float, mask: Sequence[bool], reserve: Tensor,
) -> tuple[Given, ...]:  # fmt: skip
    """Return the gradients of a batch norm, by `native_batch_norm_backward`."""
    return aten.native_batch_norm_backward(gradient, x, weight, mean, var, save_mean, save_rstd, update, eps, mask)


_RUNNING = ("running_mean", "running_var")

define(
    ("aten::native_batch_norm", "aten::_native_batch_norm_legit.default", "aten::miopen_batch_norm"),
    decomposition=_any_batch_norm,
    updates=_RUNNING,
)
define(("aten::native_batch_norm.out", "aten::_native_batch_norm_legit.out"), decomposition=_into, updates=_RUNNING)
define("aten::_batch_norm_with_update", decomposition=_with_update, updates=_RUNNING)
define("aten::_batch_norm_no_update", decomposition=_no_update)
define("aten::batch_norm_backward", decomposition=_backward)
define("aten::cudnn_batch_norm", decomposition=_cudnn, updates=_RUNNING)
define("aten::cudnn_batch_norm_backward", decomposition=_cudnn_backward)
