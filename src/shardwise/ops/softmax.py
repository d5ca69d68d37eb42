"""Softmax and logsumexp along a cut dim: every rank's maximum and sum of exponentials, merged."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..notation import dims_text, reduction
from ..notation.build import normalized
from .call import Call
from .kernel import Cut, Gather, Kernel, KernelRun, LocalCall, Reduce
from .reduce import merged
from .reduce_kernels import over, wide
from .tables import KEEPS_SIZES, register


def _finite(top: Tensor) -> Tensor:
    """What to take off before an exponential: infinite maxima would give inf - inf."""
    return torch.where(top.isfinite(), top, 0.0)


def exponents(x: Tensor, dims: Sequence[int]) -> KernelRun:
    """The maximum over these dims, in all pieces, and the sum of exponentials above it; dims are kept."""
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
    # A piece whose maximum is -inf contributes nothing; one with +inf or NaN makes the sum what it is there.
    scale = torch.where(tops == -torch.inf, 0.0, scale)
    total = torch.where(tops == -torch.inf, 0.0, totals * scale).sum(0)
    return top, total


def logsumexp(call: LocalCall, cut: Cut) -> KernelRun:
    """The logarithm of the merged sum."""
    dims = over(call)
    x = call["self"].to(wide(call.dtypes[0]))
    top, total = yield from exponents(x, dims)
    result = torch.where(top.abs() == torch.inf, top, _finite(top) + total.log())
    result = torch.where(top.isnan(), top, result).to(call.dtypes[0])
    return result if call["keepdim"] else result.squeeze(dims)


def _parts(call: LocalCall) -> KernelRun:
    """This rank's logits less their maximum, and the sum of all exponentials: NaN where the maximum is not finite."""
    x = call["self"].to(wide(call.dtypes[0]))
    top, total = yield from exponents(x, [call.dims[0] or 0])
    return x - _finite(top), torch.where(top.isfinite(), total, torch.nan), top


def softmax(call: LocalCall, cut: Cut) -> KernelRun:
    """Exponentials by the sum of all pieces."""
    above, total, _ = yield from _parts(call)
    return (above.exp() / total).to(call.dtypes[0])


def log_softmax(call: LocalCall, cut: Cut) -> KernelRun:
    """The logarithm of `softmax`, without taking it."""
    above, total, _ = yield from _parts(call)
    return (above - total.log()).to(call.dtypes[0])


def safe_softmax(call: LocalCall, cut: Cut) -> KernelRun:
    """Rows that are all masked give zeros, not NaN."""
    above, total, top = yield from _parts(call)
    return torch.where(top == -torch.inf, 0.0, above.exp() / total).to(call.dtypes[0])


def softmax_backward(call: LocalCall, cut: Cut) -> KernelRun:
    """One sum for each row is exchanged."""
    gradient, output = call["grad_output"], call["output"]
    inner = gradient.to(wide(gradient.dtype)) * output
    total = yield Reduce(inner.sum(call.dims[0], True))
    return (inner - output * total).to(call.dtypes[0])


def log_softmax_backward(call: LocalCall, cut: Cut) -> KernelRun:
    """One sum for each row is exchanged."""
    gradient, output = call["grad_output"], call["output"]
    gradient = gradient.to(wide(gradient.dtype))
    total = yield Reduce(gradient.sum(call.dims[0], True))
    return (gradient - output.to(gradient.dtype).exp() * total).to(call.dtypes[0])


def along_kernel(operands: int, *clauses: str) -> Callable[[Call], str]:
    """The rule of ops that keep all dims and look along the dim argument's with a kernel."""

    def rule(call: Call) -> str:
        ndim = call.ndim(0)
        dims = normalized(ndim, call.arg("dim"))
        text = dims_text("x", ndim, dict.fromkeys(dims, "k"))
        return " ; ".join((f"{', '.join([text] * operands)} -> {text}", *clauses, *(["kernel k"] if dims else [])))

    return rule


def _logsumexp_rule(call: Call) -> str:
    if call.tensors[0].dtype.is_complex:  # they have no maximum
        return reduction(call.ndim(0), call.arg("dim"), call.arg("keepdim"), reduce="none")
    return merged(call.ndim(0), call.arg("dim"), call.arg("keepdim"))


# What is exchanged is small next to the outputs: a maximum and a sum for each row, a sum for each row.
_FORWARD, _BACKWARD = 0.04, 0.04
register("aten::logsumexp", _logsumexp_rule, {"k": Kernel(logsumexp, traffic=8.0, joint=True)})
for _name, _run in (("_softmax", softmax), ("_log_softmax", log_softmax), ("_safe_softmax", safe_softmax)):
    register(f"aten::{_name}", along_kernel(1), {"k": Kernel(_run, traffic=_FORWARD)})
for _name, _run in (("_softmax_backward_data", softmax_backward), ("_log_softmax_backward_data", log_softmax_backward)):
    register(f"aten::{_name}", along_kernel(2, "linear 0"), {"k": Kernel(_run, traffic=_BACKWARD)})
KEEPS_SIZES |= {f"aten::{_name}" for _name in ("_softmax", "_log_softmax", "_softmax_backward_data")}
KEEPS_SIZES.add("aten::_log_softmax_backward_data")
