"""Nodes of the autograd graph: the numbers they get when they are made, and the leaves where they end."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import Node

from .backward_pass import current_pass


def next_node_number() -> int:
    """Return the number that the next node made in this thread gets. Numbers count up.

    The node of an op is made before the op runs below autograd; that of a write to a view, afterwards.
    """
    return torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]


def node_number(node: Node) -> int:
    """Return the number that a node got when it was made."""
    return node._sequence_nr()


def in_backward_pass() -> bool:
    """Return whether the autograd engine runs a backward pass in this thread."""
    return current_pass() != -1


def accumulated_leaf(node: Node | None) -> Tensor | None:
    """Return the leaf whose gradient a node accumulates; None for nodes of other kinds. Relies on `variable`."""
    return getattr(node, "variable", None)
