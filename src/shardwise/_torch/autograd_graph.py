"""Nodes of the autograd graph: the numbers they get when they are made, and the node that runs now."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import Node


def next_node_number() -> int:
    """Return the number that the next node made in this thread gets. Numbers count up."""
    return torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]


def node_number(node: Node) -> int:
    """Return the number that a node got when it was made."""
    return node._sequence_nr()


def in_backward_pass() -> bool:
    """Return whether the autograd engine runs a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1


def current_node() -> Node | None:
    """Return the node whose backward function runs now; None outside of one."""
    return torch._C._current_autograd_node()


def accumulated_leaf(node: Node | None) -> Tensor | None:
    """Return the leaf whose gradient a node accumulates; None for nodes of other kinds."""
    return getattr(node, "variable", None)
