"""What functions that are kept whole share: when they are, and how an op is called straight on distributed tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from .._torch.above_autograd import dispatch_to_subclass
from .._torch.ops import OpOverload
from ..tensor.dtensor import DTensor

_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._are_functorch_transforms_active
_autocast = torch._C._is_any_autocast_enabled
_dispatch: Callable[..., Any] = DTensor.__torch_dispatch__
_OURS = {DTensor}


def is_ours(tensors: Sequence[Tensor]) -> bool:
    """Whether a function of these tensors is kept whole: not where transforms or autocast have their own idea of it."""
    ours = {type(tensor) for tensor in tensors} == _OURS
    return ours and not (_autocast() or _transforms() or forward_ad._current_level >= 0)


def needs_grad(tensors: Sequence[Tensor]) -> bool:
    """Whether autograd has to know of a function of these tensors."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def call(op: OpOverload, *args: Any) -> Any:
    """The op, below autograd, on distributed tensors; by way of the mode that wants to see it, if one does."""
    return dispatch_to_subclass(op, args, {}) if _modes() else _dispatch(op, (), args)
