"""Optimizers: the tensor classes for which they, and the clipping of gradients, use their fast paths."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import _foreach_supported_types as _optimized
from torch.utils._foreach_utils import _foreach_supported_types as _clipped


def accept_class(cls: type[Tensor]) -> None:
    """Let optimizers and `clip_grad_norm_` use ops on lists, such as foreach ops, for tensors of this class.

    Relies on two lists of classes that PyTorch reads (`_foreach_supported_types`), and that others extend, too.
    """
    for classes in (_optimized, _clipped):
        if cls not in classes:
            classes.append(cls)


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the user has registered functions that run before or after the steps of an optimizer."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
