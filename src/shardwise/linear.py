"""`linear` as one op, and one node of autograd.

PyTorch takes F.linear apart before a tensor class sees it: into a view, a transpose, a product and a view, with as many
nodes in the backward. For a distributed tensor each of them is a dispatch. So a kernel stands above autograd and keeps
it whole: one dispatch forward, one for each gradient.

Where a transformation or autocast has its own idea of linear, it is left to that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch._ops import OpOverload

from .above_autograd import arrive, pass_on, stand_above
from .bindings import IN_PYTHON, QuickFunction
from .rules import register
from .tensor import DTensor

_linear = torch.ops.aten.linear.default
_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._are_functorch_transforms_active
_autocast = torch._C._is_any_autocast_enabled
_OURS = {DTensor}
_dispatch: Callable[..., Any] = DTensor.__torch_dispatch__


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
    return _rows(gradient).mm(weight).view(*gradient.shape[:-1], weight.shape[1])


def weight_gradient(gradient: Tensor, input: Tensor) -> Tensor:
    """The gradient of the weight: a sum over all that comes before the features."""
    return _rows(gradient).t().mm(_rows(input))


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
    IN_PYTHON[op] = run
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


IN_PYTHON[_linear] = linear


def _call(op: OpOverload, *args: Any) -> Any:
    """The op, straight to distributed tensors, unless a dispatch mode wants to see it."""
    return op(*args) if _modes() else _dispatch(op, (), args)


class _Linear(QuickFunction):
    @staticmethod
    def forward(ctx: Any, input: DTensor, weight: DTensor, bias: DTensor | None) -> DTensor:
        ctx.save_for_backward(input, weight)
        return _call(_linear, input, weight, bias) if bias is not None else _call(_linear, input, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        input, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        call = _differentiable if torch.is_grad_enabled() else _call
        return (
            call(_input_gradient, gradient, weight) if wanted[0] else None,
            call(_weight_gradient, gradient, input) if wanted[1] else None,
            _bias_gradient(gradient) if wanted[2] else None,
        )


def _bias_gradient(gradient: Any) -> Any:
    return gradient.sum(list(range(gradient.dim() - 1))) if gradient.dim() > 1 else gradient


def _differentiable(op: OpOverload, *args: Any) -> Any:
    """For gradients of gradients: by ops that have derivatives."""
    return IN_PYTHON[op](*args)


# ---- the kernel -----------------------------------------------------------------------------------------------------


def _kernel(keys: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    tensors = (input, weight) if bias is None else (input, weight, bias)
    ours = {type(tensor) for tensor in tensors} == _OURS and weight.dim() == 2
    if not ours or _autocast() or _transforms() or forward_ad._current_level >= 0:
        return pass_on(_linear, keys, input, weight, bias)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return _Linear.apply(input, weight, bias)
    return arrive(_linear, tensors, {}) if _modes() else _dispatch(_linear, (), tensors)


stand_above(_linear, _kernel)
