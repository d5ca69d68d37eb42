"""Which plain tensors are known to be the same on all ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from .modes import modes


def taken_as_replicated(tensor: Tensor) -> bool:
    """Whether a plain tensor is the same on all ranks: the user said so, or PyTorch's backward formulas made it."""
    if modes.implicit_replication:
        return True
    node = torch._C._current_autograd_node()
    return node is not None and not isinstance(node, torch.autograd.function.BackwardCFunction)


def record_replicated(tensor: Tensor) -> None:
    """Note that a plain tensor was taken as replicated."""
