"""Notes on autograd nodes, made when a node is made: by an op of PyTorch, an autograd function, a write to a view.

Relies on PyTorch's anomaly mode: while it is on, the constructor of every node stores what
`torch.fx.traceback.format_stack()` returns under `traceback_` in the node's metadata. A list with one string, the note,
is stored in the place of a formatted stack, which would cost much more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import torch
import torch.autograd.graph
import torch.fx.traceback
import torch.utils.checkpoint
from torch.autograd.graph import Node

from .backward_pass import metadata_of

_KEY = "traceback_"
_ENGINE = torch.autograd.graph._engine_run_backward.__code__
_CHECKPOINT = torch.utils.checkpoint.__file__


@contextmanager
def noting_nodes(note: Callable[[], str]) -> Iterator[None]:
    """Store what `note()` returns in every autograd node that is made inside; `note_of` returns it."""
    enabled, checks_nan = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    before = torch.fx.traceback.format_stack
    torch.fx.traceback.format_stack = lambda: [note()]
    torch.autograd.set_detect_anomaly(True, check_nan=enabled and checks_nan)
    try:
        yield
    finally:
        torch.autograd.set_detect_anomaly(enabled, check_nan=checks_nan)
        torch.fx.traceback.format_stack = before


def note_of(node: Node | None) -> str | None:
    """Return the note that a node got when it was made, if it was made inside `noting_nodes`."""
    found = metadata_of(node).get(_KEY) if node is not None else None
    return found[0] if found else None


def runs_backward(frame: FrameType) -> bool:
    """Return whether a frame is that of PyTorch's function that runs a backward pass."""
    return frame.f_code is _ENGINE


def recomputes(frame: FrameType) -> bool:
    """Return whether a frame is part of `torch.utils.checkpoint`, which runs forward code again in a backward pass."""
    return frame.f_code.co_filename == _CHECKPOINT
