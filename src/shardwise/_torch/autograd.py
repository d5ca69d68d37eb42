"""The backward pass that is running."""

from __future__ import annotations

import torch


def in_backward() -> bool:
    """Whether a node of autograd runs on this thread, so that a call comes from a backward formula."""
    return torch._C._current_autograd_node() is not None
