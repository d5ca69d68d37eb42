"""Function transforms, forward-mode derivatives and autocast, which may change an op before tensor classes see it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from .ops import OpOverload

outside_transforms = temporarily_clear_interpreter_stack
"""`with outside_transforms():` runs code as if no transform were active, for tensors that no transform has wrapped."""

is_wrapped: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
"""Whether a tensor is the wrapper that a transform has put around another one. Such a wrapper is a plain `Tensor`."""


def innermost(tensor: Tensor) -> Tensor:
    """Return the tensor inside all wrappers of transforms."""
    while is_wrapped(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Whether a transform of `torch.func` (vmap, grad, jvp) is active in this thread."""

autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""Whether autocast is on in this thread, for any device."""


BATCHED = "FuncTorchBatched"
"""The dispatch key of vmap's batching rules."""


def batch_rule(func: OpOverload) -> Callable[..., object]:
    """Return PyTorch's batching rule of an op, `rule(keys, *args)`, which takes the wrappers of batched tensors."""
    rule: Callable[..., object] = torch.library.get_kernel(func, BATCHED).call_boxed
    return rule


def forward_derivative_active() -> bool:
    """Return whether forward-mode differentiation is active."""
    return forward_ad._current_level >= 0


def anything_transforms() -> bool:
    """Return whether transforms, autocast or forward-mode differentiation is active."""
    return autocast_enabled() or transforms_active() or forward_ad._current_level >= 0
