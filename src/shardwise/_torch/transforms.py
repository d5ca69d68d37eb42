"""What may treat an op in its own way before tensors see it: function transforms, forward derivatives, autocast."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.autograd.forward_ad as forward_ad

transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Whether a transform of `torch.func` (vmap, grad, jvp) is active in this thread."""

autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""Whether autocast is on in this thread, for any device."""


def anything_transforms() -> bool:
    """Whether transforms, autocast or a level of forward-mode differentiation is active."""
    return autocast_enabled() or transforms_active() or forward_ad._current_level >= 0
