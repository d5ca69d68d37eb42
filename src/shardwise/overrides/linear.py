"""`linear` as one op, and one node of autograd.

PyTorch makes a view, a transpose, a product and a view of it, with as many nodes in the backward. For a distributed
tensor each of them is a dispatch; here there is one forward, and one for each gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._torch.above_autograd import call_original, override_above_autograd
from .._torch.autograd import QuickFunction
from .._torch.ops import OpOverload
from ..ops.matmul import linear_input_gradient, linear_weight_gradient
from ..ops.registry import resolve
from ..sharding.base import DTensorBase
from .call import call, is_ours, needs_grad

_linear = torch.ops.aten.linear.default


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
            run(linear_input_gradient, gradient, weight) if wanted[0] else None,
            run(linear_weight_gradient, gradient, input) if wanted[1] else None,
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
