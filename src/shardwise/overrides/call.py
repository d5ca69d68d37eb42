"""What ops with a node of autograd of their own share: when they apply, and how they call ops below autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch.above_autograd import dispatch_to_subclass
from .._torch.modes import count_modes
from .._torch.ops import OpOverload
from .._torch.transforms import anything_transforms
from ..sharding.base import DTensorBase


def is_ours(tensors: Sequence[Tensor]) -> bool:
    """Whether all tensors are distributed, and neither transforms nor autocast treat the op in their own way."""
    for tensor in tensors:
        if not isinstance(tensor, DTensorBase):
            return False
    return not anything_transforms()


def needs_grad(tensors: Sequence[Tensor]) -> bool:
    """Whether autograd has to record an op on these tensors."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def call(op: OpOverload, *args: Any) -> Any:
    """Call an op below autograd, its first argument being a distributed tensor; by way of a dispatch mode if any is on.

    Without modes this is the hot path itself, not PyTorch's way to it.
    """
    if count_modes():
        return dispatch_to_subclass(op, args, {})
    return type(args[0]).__torch_dispatch__(op, (), args)
