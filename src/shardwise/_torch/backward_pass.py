"""Autograd's state in this thread: the node and the backward pass that run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

current_node: Callable[[], Node | None] = torch._C._current_autograd_node
"""The node that the backward pass of this thread evaluates; None outside of a backward pass.

Relies on a node being the current one from its first tensor hook to its last post hook.
"""

current_pass: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward pass of this thread; -1 outside of one. Each pass has its own number."""


def metadata_of(node: Node) -> dict[str, Any]:
    """Return the metadata dict of a node, which anyone may write; it lives as long as the node."""
    found: Any = node.metadata
    return found


def materialized(tensor: Tensor) -> Tensor:
    """Return the tensor, or zeros in its place if it has no memory: derivative formulas may return such zeros."""
    return torch.zeros_like(tensor) if tensor._is_zerotensor() else tensor
