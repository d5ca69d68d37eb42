"""Autograd's state in this thread: which node runs, and which hooks are called on tensors that it saves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks

current_node: Callable[[], Node | None] = torch._C._current_autograd_node
"""The node that the backward pass of this thread evaluates; None outside of a backward pass.

Relies on the engine naming a node as the current one from its first tensor hook to its last post hook.
"""

current_pass: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward pass of this thread; -1 outside of one. Each pass has its own number."""


def metadata_of(node: Node) -> dict[str, Any]:
    """The dict of a node, for anyone's notes; it lives as long as the node."""
    found: Any = node.metadata
    return found


def saved_tensor_hooks() -> tuple[Callable[[object], object], Callable[[object], object]] | None:
    """The (pack, unpack) functions of the innermost `saved_tensors_hooks` block, if any is active in this thread."""
    found: tuple[Callable[[Any], object], Callable[[object], object]] | None = _top_hooks(False)
    return found


def materialized(tensor: Tensor) -> Tensor:
    """The tensor, with memory: derivative formulas may return zeros that have none."""
    return torch.zeros_like(tensor) if tensor._is_zerotensor() else tensor
