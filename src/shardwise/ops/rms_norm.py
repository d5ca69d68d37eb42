"""`rms_norm` as one op, and one node of autograd, on CPU as on GPUs.

For tensor subclasses PyTorch decomposes it on every device, although it has a fused kernel for GPUs: six ops, and
twelve in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from .._torch.above_autograd import Keys, call_original
from .._torch.autograd import Context, QuickFunction
from .._torch.ops import OpOverload
from ..sharding.base import DTensorBase
from .above_autograd import call, is_ours, needs_grad
from .norm import rms_norm_gradients, rms_norm_rstd
from .registry import definitions_in

define = definitions_in(__name__)

_forward = torch.ops.aten._fused_rms_norm.default
_backward = torch.ops.aten._fused_rms_norm_backward.default
_DTYPES = (torch.float32, torch.float64)


class _Saved(Context, Protocol):
    normalized_shape: list[int]
    eps: float | None


class _RMSNorm(QuickFunction):
    @staticmethod
    def forward(
        ctx: _Saved, input: DTensorBase, weight: DTensorBase | None, normalized_shape: list[int], eps: float | None
    ) -> DTensorBase:
        result, factor = call(_forward, input, normalized_shape, weight, eps)
        ctx.save_for_backward(input, weight, factor)
        ctx.normalized_shape, ctx.eps = normalized_shape, eps
        return result

    @staticmethod
    def backward(ctx: _Saved, gradient: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, factor = ctx.saved_tensors
        shape, mask = ctx.normalized_shape, list(ctx.needs_input_grad[:2])
        if torch.is_grad_enabled():  # for gradients of gradients, by ops that have derivatives
            factor = rms_norm_rstd(input, shape, ctx.eps)
            return *rms_norm_gradients(gradient, input, shape, factor, weight, mask), None, None
        return *call(_backward, gradient, input, shape, factor, weight, mask), None, None


def _is_served(tensors: Sequence[Tensor], normalized_shape: Sequence[int]) -> bool:
    """Return whether shapes fit, and no wider dtype is needed for sums.

    PyTorch decomposes other calls, or raises an error.
    """
    (input, *weight), shape = tensors, tuple(normalized_shape)
    if not shape or input.shape[-len(shape) :] != shape or input.dtype not in _DTYPES:
        return False
    return not weight or (weight[0].shape == shape and weight[0].dtype == input.dtype)


def _override(func: OpOverload) -> Callable[..., object]:
    """Return the override: one autograd node for the norm, dispatched as one op."""

    def kernel(
        keys: Keys, input: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None
    ) -> object:
        tensors = (input,) if weight is None else (input, weight)
        if not is_ours(tensors) or not _is_served(tensors, normalized_shape):
            return call_original(func, keys, input, normalized_shape, weight, eps)
        if needs_grad(tensors):
            return _RMSNorm.apply(input, weight, list(normalized_shape), eps)
        return call(_forward, input, list(normalized_shape), weight, eps)[0]

    return kernel


define("aten::rms_norm", override=_override)
