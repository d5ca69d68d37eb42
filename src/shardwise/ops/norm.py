"""Layer norm, RMS norm, group norm, weight norm and renorm.

The normalized dims of layer norm and RMS norm may be sharded: a kernel merges the statistics of all ranks. The other
ops need the elements that are normalized together on one rank.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..notation.build import dims_text, join, kernel_clause, normalized
from .call import Call
from .kernel import FactorShard, Kernel, KernelRun, LocalCall, LocalResult, Reduce
from .op import Local
from .reduce import wide
from .registry import definitions_in
from .variance import moments

define = definitions_in(__name__)

TRAFFIC = 0.04
"""Bytes that a kernel receives, as a multiple of its outputs: statistics are small beside the tensor."""


def cast_results(results: Sequence[Tensor | None], dtypes: Sequence[torch.dtype]) -> tuple[Tensor | None, ...]:
    """Return results in the dtypes of the op's results; None for those that the caller did not request."""
    remaining = iter(dtypes)
    return tuple(None if result is None else result.to(next(remaining)) for result in results)


# ---- layer norm and RMS norm: rules ---------------------------------------------------------------------------------


def normalized_dims(ndim: int, count: int) -> tuple[str, str, str]:
    """Return the patterns of an operand normalized over its last `count` dims, of these dims alone, and of a statistic.

    >>> normalized_dims(3, 1)
    ('x0 x1 k2', 'k2', 'x0 x1 1')
    """
    last = range(ndim - count, ndim)
    operand = dims_text("x", ndim, {dim: f"k{dim}" for dim in last})
    return operand, " ".join(f"k{dim}" for dim in last), dims_text("x", ndim, dict.fromkeys(last, "1"))


def _layer_rule(template: str) -> Callable[[Call], str]:
    """Return the rule `template` with the patterns of a call: {x} for the operand, {w} the weight, {s} a statistic."""

    @functools.lru_cache
    def text(ndim: int, count: int) -> str:
        x, w, s = normalized_dims(ndim, count)
        return join(template.format(x=x, w=w, s=s), f"normalized_shape=({w})", kernel_clause(w.split()))

    def rule(call: Call) -> str:
        return text(call.ndim(0), len(call.arg("normalized_shape")))

    return rule


# ---- layer norm and RMS norm: formulas ------------------------------------------------------------------------------
# The mean over the normalized dims is an argument: locally it is `Tensor.mean`, in a kernel it takes communication.


def _scaled(x: Tensor, weight: Tensor | None) -> Tensor:
    return x if weight is None else x * weight


def _rms_rstd(mean_square: Tensor, dtype: torch.dtype, eps: float | None) -> Tensor:
    """Return the reciprocal of the root mean square.

    `dtype` is that of the input, whose epsilon is the default of `eps`.
    """
    return mean_square.add(torch.finfo(dtype).eps if eps is None else eps).rsqrt()


def _gradients(
    gradient: Tensor,
    x_hat: Tensor,
    scaled: Tensor,
    rstd: Tensor,
    means: Sequence[Tensor] | Tensor,
    batch_dims: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the input, the weight and the bias, as many as `output_mask` has; None where it is False.

    `x_hat` is the normalized input and `scaled` the gradient times the weight. `means` over the normalized dims are
    those of `scaled * x_hat` and, for layer norm, of `scaled`; none is needed if the input's gradient is not requested.
    `batch_dims` is the number of dims before the normalized ones.
    """
    rows = list(range(batch_dims))
    results: list[Tensor | None] = [None] * len(output_mask)
    if output_mask[0]:
        centered = scaled - means[1] if len(means) > 1 else scaled
        results[0] = rstd * (centered - x_hat * means[0])
    if output_mask[1]:
        products = gradient * x_hat
        results[1] = products.sum(rows) if rows else products
    if len(output_mask) > 2 and output_mask[2]:
        results[2] = gradient.sum(rows) if rows else gradient
    return tuple(results)


# ---- RMS norm on one rank -------------------------------------------------------------------------------------------

_fused_rms_norm = torch.ops.aten._fused_rms_norm.default
_fused_rms_norm_backward = torch.ops.aten._fused_rms_norm_backward.default


def rms_norm_rstd(input: Tensor, normalized_shape: Sequence[int], eps: float | None) -> Tensor:
    """Return the factor by which RMS norm multiplies each row of `input`."""
    mean_square = input.square().mean(_last_dims(normalized_shape), keepdim=True)
    return _rms_rstd(mean_square, input.dtype, eps)


def rms_norm_gradients(
    gradient: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    rstd: Tensor,
    weight: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the input and the weight of RMS norm, by ops that have derivatives themselves."""
    x_hat, scaled = input * rstd, _scaled(gradient, weight)
    means = [(scaled * x_hat).mean(_last_dims(normalized_shape), keepdim=True)] if output_mask[0] else []
    batch_dims = input.dim() - len(normalized_shape)
    return _gradients(gradient, x_hat, scaled, rstd, means, batch_dims, output_mask)


def _rms_norm_in_python(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    """Compute `_fused_rms_norm` on one rank: PyTorch has a fused kernel for GPUs only."""
    if input.device.type != "cpu":
        result: tuple[Tensor, Tensor] = _fused_rms_norm(input, normalized_shape, weight, eps)
        return result
    rstd = rms_norm_rstd(input, normalized_shape, eps)
    return _scaled(input * rstd, weight), rstd


def _rms_norm_backward_in_python(
    gradient: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    rstd: Tensor,
    weight: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Compute `_fused_rms_norm_backward` on one rank."""
    run = rms_norm_gradients if gradient.device.type == "cpu" else _fused_rms_norm_backward
    return run(gradient, input, normalized_shape, rstd, weight, output_mask)


def _last_dims(normalized_shape: Sequence[int]) -> list[int]:
    return list(range(-len(normalized_shape), 0))


# ---- layer norm and RMS norm over sharded dims ----------------------------------------------------------------------


def _layer_dims(call: LocalCall) -> tuple[list[int], int]:
    """Return the normalized dims, and the number of elements in them on all ranks together."""
    shape = call.given[0].shape
    dims = list(range(len(shape) - len(call["normalized_shape"]), len(shape)))
    return dims, math.prod(shape[dim] for dim in dims)


def _wide(call: LocalCall, name: str) -> Tensor:
    """Return an argument in the dtype in which it is summed."""
    x: Tensor = call[name]
    return x.to(wide(x.dtype))


def layer_norm(call: LocalCall, shard: FactorShard) -> KernelRun:
    """Normalize by the mean and the variance over all ranks."""
    x, (dims, count) = _wide(call, "input"), _layer_dims(call)
    center, squares = yield from moments(x, dims, count, shard)
    rstd = (squares / count + call["eps"]).rsqrt()
    result = _scaled((x - center) * rstd, call["weight"])
    if call["bias"] is not None:
        result = result + call["bias"]
    return cast_results((result, center, rstd), call.dtypes)


def rms_norm(call: LocalCall, shard: FactorShard) -> KernelRun:
    """Normalize by the mean square over all ranks."""
    x, (dims, count) = _wide(call, "input"), _layer_dims(call)
    squares = yield Reduce(x.square().sum(dims, True))
    rstd = _rms_rstd(squares / count, call["input"].dtype, call["eps"])
    return cast_results((_scaled(x * rstd, call["weight"]), rstd), call.dtypes)


def layer_norm_backward(call: LocalCall, shard: FactorShard) -> KernelRun:
    """Compute the gradients of layer norm; two sums for each row are reduced."""
    gradient, x, (dims, count) = _wide(call, "grad_out"), _wide(call, "input"), _layer_dims(call)
    x_hat, scaled = (x - call["mean"]) * call["rstd"], _scaled(gradient, call["weight"])
    sums = yield Reduce(torch.stack([(scaled * x_hat).sum(dims, True), scaled.sum(dims, True)]))
    found = _gradients(gradient, x_hat, scaled, call["rstd"], sums / count, dims[0], call["output_mask"])
    return cast_results(found, call.dtypes)


def rms_norm_backward(call: LocalCall, shard: FactorShard) -> KernelRun:
    """Compute the gradients of RMS norm; one sum for each row is reduced."""
    gradient, x, (dims, count) = _wide(call, "grad_out"), _wide(call, "input"), _layer_dims(call)
    x_hat, scaled = x * call["rstd"], _scaled(gradient, call["weight"])
    mean = (yield Reduce((scaled * x_hat).sum(dims, True))) / count
    found = _gradients(gradient, x_hat, scaled, call["rstd"], (mean,), dims[0], call["output_mask"])
    return cast_results(found, call.dtypes)


def _dtypes_on_cpu(call: Call) -> tuple[torch.dtype, ...]:
    """Return the dtypes on a CPU: statistics have that of the input or, if wider, of the weights; float32 on a GPU."""
    given = [call.arg(name) for name in ("input", "weight", "bias")]
    wide = functools.reduce(torch.promote_types, [tensor.dtype for tensor in given if tensor is not None])
    return given[0].dtype, wide, wide


define(
    "aten::native_layer_norm",
    _layer_rule("{x}, {w}, {w} -> {x}, {s}, {s} ; reduce none"),
    kernels={"k": Kernel(layer_norm, traffic=TRAFFIC, joint=True)},
    keeps_sizes=True,
    cpu_dtypes=_dtypes_on_cpu,
)
define(
    "aten::native_layer_norm_backward",
    _layer_rule("{x}, {x}, {s}, {s}, {w}, {w} -> {x}, {w}, {w} ; linear 0"),
    kernels={"k": Kernel(layer_norm_backward, traffic=TRAFFIC, joint=True)},
    keeps_sizes=True,
    derivative_makes_tensors=True,
)
define(
    "aten::_fused_rms_norm",
    _layer_rule("{x}, {w} -> {x}, {s} ; reduce none"),
    kernels={"k": Kernel(rms_norm, traffic=TRAFFIC, joint=True)},
    python=_rms_norm_in_python,
)
define(
    "aten::_fused_rms_norm_backward",
    _layer_rule("{x}, {x}, {s}, {w} -> {x}, {w} ; linear 0"),
    kernels={"k": Kernel(rms_norm_backward, traffic=TRAFFIC, joint=True)},
    python=_rms_norm_backward_in_python,
)


# ---- group norm, weight norm, renorm --------------------------------------------------------------------------------


def _group_rule(sides: str, *clauses: str) -> Callable[[Call], str]:
    """Return the rule of group norm with `{x}` for the operand.

    Groups may be sharded, the channels of a group may not.
    """
    patterns = sides.format(x="n (g [c]) [s..]")
    return lambda call: join(patterns, *clauses, f"g={call.arg('group')}", "N=(n)", "C=((g c))", "group=(g)")


def _slice_rule(template: str) -> Callable[[Call], str]:
    """Return the rule of an op on the slices along `dim`: {x} for the tensor, {s} for one number per slice."""

    def rule(call: Call) -> str:
        ndim = call.ndim(0)
        others = set(range(ndim)).difference(normalized(ndim, call.arg("dim")))
        x = dims_text("x", ndim, {dim: f"[x{dim}]" for dim in others})
        return template.format(x=x, s=dims_text("x", ndim, dict.fromkeys(others, "1")))

    return rule


def _on_contiguous(call: LocalCall) -> LocalResult:
    """Run the op on contiguous operands, which its implementation requires; empty shards give zeros."""
    tensors = {name: x for name, x in call.arguments.items() if isinstance(x, Tensor)}
    if all(x.numel() for x in tensors.values()):
        return call.run(**{name: x.contiguous() for name, x in tensors.items()})
    like = next(iter(tensors.values()))
    zeros = (call.zeros(like, result) for result in range(len(call.dtypes)))
    requested = call.arguments.get("output_mask") or [True] * len(call.dtypes)
    return tuple(next(zeros) if wanted else None for wanted in requested)


define(
    "aten::native_group_norm",
    _group_rule("{x}, (g [c]), (g [c]) -> {x}, n g, n g"),
    local=Local(_on_contiguous),
)
define(
    "aten::native_group_norm_backward",
    _group_rule("{x}, {x}, n g, n g, (g [c]) -> {x}, (g [c]), (g [c])", "linear 0"),
    local=Local(_on_contiguous),
)
define("aten::renorm", _slice_rule("{x} -> {x}"))
define("aten::_weight_norm_interface", _slice_rule("{x}, {s} -> {x}, {s}"), local=Local(_on_contiguous))
define(
    "aten::_weight_norm_interface_backward",
    _slice_rule("{x}, {x}, {s}, {s} -> {x}, {s} ; linear 0"),
    local=Local(_on_contiguous),
)
