"""Softmax and logsumexp along a sharded dim: the maxima and the sums of exponentials of all ranks are merged."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..notation import dims_text, reduction
from ..notation.build import join, normalized
from .call import Call
from .kernel import FactorShard, Gather, Kernel, KernelRun, LocalCall, Reduce, Steps
from .reduce import merged, over, wide
from .registry import definitions_in

define = definitions_in(__name__)


def _finite(top: Tensor) -> Tensor:
    """Return the maximum to subtract before an exponential: 0 for an infinite one, which would give inf - inf."""
    return torch.where(top.isfinite(), top, 0.0)


def exponents(x: Tensor, dims: Sequence[int]) -> Steps[tuple[Tensor, Tensor]]:
    """Return the maximum over these dims on all ranks, and the sum of the exponentials of x minus it; dims are kept."""
    dims = list(dims)
    if all(x.shape[dim] for dim in dims):
        top = x.amax(dims, True)
        total = (x - _finite(top)).exp().sum(dims, True)
    else:
        shape = [1 if dim in dims else size for dim, size in enumerate(x.shape)]
        top, total = x.new_full(shape, -torch.inf), x.new_zeros(shape)
    parts = yield Gather(torch.stack([top, total]))
    tops, totals = parts.unbind(1)
    top = tops.amax(0)
    scale = (_finite(tops) - _finite(top)).exp()
    # A rank whose maximum is -inf adds nothing; one with +inf or NaN determines the sum.
    scale = torch.where(tops == -torch.inf, 0.0, scale)
    total = torch.where(tops == -torch.inf, 0.0, totals * scale).sum(0)
    return top, total


def logsumexp(call: LocalCall, shard: FactorShard) -> KernelRun:
    """Compute the logarithm of the merged sum."""
    dims = over(call)
    x = call["self"].to(wide(call.dtypes[0]))
    top, total = yield from exponents(x, dims)
    result = torch.where(top.abs() == torch.inf, top, _finite(top) + total.log())
    result = torch.where(top.isnan(), top, result).to(call.dtypes[0])
    return result if call["keepdim"] else result.squeeze(dims)


def _exponents_of(call: LocalCall) -> Steps[tuple[Tensor, Tensor, Tensor]]:
    """Return this rank's logits minus the maximum, the sum of exponentials, and the maximum.

    The sum is NaN for infinite maxima.
    """
    x = call["self"].to(wide(call.dtypes[0]))
    top, total = yield from exponents(x, [call.dims[0] or 0])
    return x - _finite(top), torch.where(top.isfinite(), total, torch.nan), top


def softmax(call: LocalCall, shard: FactorShard) -> KernelRun:
    """Divide the exponentials by their sum over all ranks."""
    above, total, _ = yield from _exponents_of(call)
    return (above.exp() / total).to(call.dtypes[0])


def log_softmax(call: LocalCall, shard: FactorShard) -> KernelRun:
    """Subtract the logarithm of the sum of exponentials over all ranks."""
    above, total, _ = yield from _exponents_of(call)
    return (above - total.log()).to(call.dtypes[0])


def safe_softmax(call: LocalCall, shard: FactorShard) -> KernelRun:
    """Compute `softmax`, but with zeros, not NaN, for rows of nothing but -inf."""
    above, total, top = yield from _exponents_of(call)
    return torch.where(top == -torch.inf, 0.0, above.exp() / total).to(call.dtypes[0])


def softmax_backward(call: LocalCall, shard: FactorShard) -> KernelRun:
    """Compute the gradient; one sum for each row is reduced."""
    gradient, output = call["grad_output"], call["output"]
    inner = gradient.to(wide(gradient.dtype)) * output
    total = yield Reduce(inner.sum(call.dims[0], True))
    return (inner - output * total).to(call.dtypes[0])


def log_softmax_backward(call: LocalCall, shard: FactorShard) -> KernelRun:
    """Compute the gradient; one sum for each row is reduced."""
    gradient, output = call["grad_output"], call["output"]
    gradient = gradient.to(wide(gradient.dtype))
    total = yield Reduce(gradient.sum(call.dims[0], True))
    return (gradient - output.to(gradient.dtype).exp() * total).to(call.dtypes[0])


def _softmax_rule(operands: int, *clauses: str) -> Callable[[Call], str]:
    """Return the rule of an op whose operands and result have the same dims, of which `dim` has a kernel."""

    def rule(call: Call) -> str:
        ndim, dim = call.ndim(0), call.arg("dim")
        if not -max(ndim, 1) <= dim < max(ndim, 1):  # the meta kernel accepts any dim
            least, most = -max(ndim, 1), max(ndim, 1) - 1
            raise IndexError(f"Dimension out of range (expected to be in range of [{least}, {most}], but got {dim})")
        dims = normalized(ndim, dim)
        text = dims_text("x", ndim, dict.fromkeys(dims, "k"))
        return join(f"{', '.join([text] * operands)} -> {text}", *clauses, "kernel k" if dims else "")

    return rule


def _logsumexp_rule(call: Call) -> str:
    """Return a rule whose kernel merges maxima and sums of all shards; complex numbers have no maximum."""
    if call.tensors[0].dtype.is_complex:  # complex numbers have no maximum
        return reduction(call.ndim(0), call.arg("dim"), call.arg("keepdim"), reduce="none")
    return merged(call.ndim(0), call.arg("dim"), call.arg("keepdim"))


# Ranks exchange little beside the outputs: a maximum and a sum for each row, in backward a sum for each row.
_TRAFFIC = 0.04
define("aten::logsumexp", _logsumexp_rule, kernels={"k": Kernel(logsumexp, traffic=8.0, joint=True)})
define("aten::_safe_softmax", _softmax_rule(1), kernels={"k": Kernel(safe_softmax, traffic=_TRAFFIC)})
for _name, _operands, _clauses, _run in (
    ("_softmax", 1, (), softmax),
    ("_log_softmax", 1, (), log_softmax),
    ("_softmax_backward_data", 2, ("linear 0",), softmax_backward),
    ("_log_softmax_backward_data", 2, ("linear 0",), log_softmax_backward),
):
    define(
        f"aten::{_name}",
        _softmax_rule(_operands, *_clauses),
        kernels={"k": Kernel(_run, traffic=_TRAFFIC)},
        keeps_sizes=True,
    )
