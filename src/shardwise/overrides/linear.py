"""`linear` as one op, and one node of autograd.

PyTorch makes a view, a transpose, a product and a view of it, with as many nodes in the backward. For a distributed
tensor each of them is a dispatch; here there is one forward, and one for each gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._torch.above_autograd import call_original, override_above_autograd
from .._torch.bindings import QuickFunction
from .._torch.ops import OpOverload
from ..ops.registry import resolve
from ..ops.tables import IN_PYTHON, register
from ..sharding.base import DTensorBase
from .call import call, is_ours, needs_grad

_linear = torch.ops.aten.linear.default


# ---- on local parts -------------------------------------------------------------------------------------------------
#
# As products of matrices: PyTorch's own way for more dims asks for sizes that differ from rank to rank when simulated.


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear."""
    if type(input) is Tensor:
        return torch._C._nn.linear(input, weight, bias)
    rows, columns = _rows(input), weight.t()
    product = rows.mm(columns) if bias is None else torch.addmm(bias, rows, columns)
    return product.view(*input.shape[:-1], weight.shape[0])


def input_gradient(gradient: Tensor, weight: Tensor) -> Tensor:
    """The gradient of the input, from that of the output."""
    return _rows(gradient).mm(_conjugate(weight)).view(*gradient.shape[:-1], weight.shape[1])


def weight_gradient(gradient: Tensor, input: Tensor) -> Tensor:
    """The gradient of the weight: a sum over all that comes before the features."""
    return _rows(gradient).t().mm(_rows(_conjugate(input)))


def _conjugate(tensor: Tensor) -> Tensor:
    return tensor.conj_physical() if tensor.is_complex() else tensor


def _rows(tensor: Tensor) -> Tensor:
    return tensor.flatten(0, -2) if tensor.dim() > 1 else tensor.unsqueeze(0)


# ---- the gradients, as ops of their own -----------------------------------------------------------------------------

_library = torch.library.Library("shardwise", "DEF")


def _define(signature: str, run: Callable[..., Tensor], rule: str) -> OpOverload:
    name = signature.partition("(")[0]
    _library.define(signature)
    _library.impl(name, run, "CompositeExplicitAutograd")
    register(f"shardwise::{name}", rule)
    op: OpOverload = getattr(torch.ops.shardwise, name).default
    IN_PYTHON[f"shardwise::{name}.default"] = run
    return op


_input_gradient = _define(
    "linear_input_gradient(Tensor gradient, Tensor weight) -> Tensor",
    input_gradient,
    "x.. n, n k -> x.. k ; linear 0 | 1",
)
_weight_gradient = _define(
    "linear_weight_gradient(Tensor gradient, Tensor input) -> Tensor",
    weight_gradient,
    "x.. n, x.. k -> n k ; linear 0 | 1",
)


IN_PYTHON["aten::linear.default"] = linear


class _Linear(QuickFunction):
    @staticmethod
    def forward(ctx: Any, input: DTensorBase, weight: DTensorBase, bias: DTensorBase | None) -> DTensorBase:
        ctx.save_for_backward(input, weight)
        return call(_linear, input, weight, bias) if bias is not None else call(_linear, input, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        input, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        run = _differentiable if torch.is_grad_enabled() else call
        return (
            run(_input_gradient, gradient, weight) if wanted[0] else None,
            run(_weight_gradient, gradient, input) if wanted[1] else None,
            _bias_gradient(gradient) if wanted[2] else None,
        )


def _bias_gradient(gradient: Any) -> Any:
    return gradient.sum(list(range(gradient.dim() - 1))) if gradient.dim() > 1 else gradient


def _differentiable(op: OpOverload, *args: Any) -> Any:
    """For gradients of gradients: by ops that have derivatives."""
    return resolve(op).python(*args)  # type: ignore[misc]


# ---- the kernel -----------------------------------------------------------------------------------------------------


def _kernel(keys: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    tensors = (input, weight) if bias is None else (input, weight, bias)
    if weight.dim() != 2 or not is_ours(tensors):
        return call_original(_linear, keys, input, weight, bias)
    return _Linear.apply(input, weight, bias) if needs_grad(tensors) else call(_linear, *tensors)


override_above_autograd(_linear, _kernel)
