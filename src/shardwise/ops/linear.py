"""`linear` and its gradients: one op each, and one node of autograd.

PyTorch decomposes it into a view, a transpose, a product and a view, with as many nodes of autograd. For a distributed
tensor each op is a dispatch; here there is one forward, and one for each gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .._torch.above_autograd import Keys, call_original
from .._torch.autograd import Context, QuickFunction
from .._torch.modes import count_modes
from .._torch.ops import OpOverload
from ..sharding.base import DTensorBase
from .above_autograd import call, is_ours, is_watched, needs_grad, new_op
from .registry import definitions_in

define = definitions_in(__name__)

# ---- on local shards ------------------------------------------------------------------------------------------------
#
# This code multiplies matrices: PyTorch's own code for more dims asks for sizes, which differ between simulated ranks.

_plain_linear = torch.nn.functional.linear


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `F.linear` on local shards."""
    if type(input) is Tensor:
        return _plain_linear(input, weight, bias)
    rows, columns = _rows(input), weight.t()
    product = rows.mm(columns) if bias is None else torch.addmm(bias, rows, columns)
    return product.view(*input.shape[:-1], weight.shape[0])


def input_gradient(gradient: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of the input, from that of the output."""
    if weight.is_complex():
        weight = weight.conj_physical()
    return _rows(gradient).mm(weight).view(*gradient.shape[:-1], weight.shape[1])


def weight_gradient(gradient: Tensor, input: Tensor) -> Tensor:
    """Return the gradient of the weight: a sum over all dims before the features."""
    if input.is_complex():
        input = input.conj_physical()
    return _rows(gradient).t().mm(_rows(input))


def _rows(tensor: Tensor) -> Tensor:
    return tensor.flatten(0, -2) if tensor.dim() > 1 else tensor.unsqueeze(0)


linear_input_gradient = new_op("linear_input_gradient(Tensor gradient, Tensor weight) -> Tensor", input_gradient)
linear_weight_gradient = new_op("linear_weight_gradient(Tensor gradient, Tensor input) -> Tensor", weight_gradient)


# ---- above autograd -------------------------------------------------------------------------------------------------

_linear = torch.ops.aten.linear.default


class _Linear(QuickFunction):
    @staticmethod
    def forward(ctx: Context, input: DTensorBase, weight: DTensorBase, bias: DTensorBase | None) -> DTensorBase:
        # Only what the gradients need: what is not saved may be written before the backward pass.
        for_input, for_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(input if for_weight else None, weight if for_input else None)
        return call(_linear, input, weight, bias) if bias is not None else call(_linear, input, weight)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        run = _by_products if torch.is_grad_enabled() or (count_modes() and is_watched()) else call
        return (
            run(linear_input_gradient, gradient, weight) if wanted[0] else None,
            run(linear_weight_gradient, gradient, input) if wanted[1] else None,
            _bias_gradient(gradient) if wanted[2] else None,
        )


def _bias_gradient(gradient: Tensor) -> Tensor:
    return gradient.sum(list(range(gradient.dim() - 1))) if gradient.dim() > 1 else gradient


def _by_products(op: OpOverload, *args: Tensor) -> Tensor:
    """Compute a gradient by PyTorch's ops, which have derivatives of their own, and which dispatch modes know."""
    return input_gradient(*args) if op is linear_input_gradient else weight_gradient(*args)


def _override(func: OpOverload) -> Callable[..., object]:
    """Return the override: one autograd node for the layer, dispatched as one op."""

    def kernel(keys: Keys, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> object:
        tensors = (input, weight) if bias is None else (input, weight, bias)
        fits = weight.dim() == 2 and (bias is None or bias.dim() == 1)
        if not fits or not is_ours(tensors) or is_watched():
            return call_original(func, keys, input, weight, bias)
        return _Linear.apply(input, weight, bias) if needs_grad(tensors) else call(func, *tensors)

    return kernel


define("aten::linear", "x.. k, n k, n -> x.. n ; linear 0+2 | 1+2", python=linear, override=_override)
define("shardwise::linear_input_gradient", "x.. n, n k -> x.. k ; linear 0 | 1", python=input_gradient)
define("shardwise::linear_weight_gradient", "x.. n, x.. k -> n k ; linear 0 | 1", python=weight_gradient)
