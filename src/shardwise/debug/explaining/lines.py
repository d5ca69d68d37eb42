"""The user's line of an op; in a backward pass the line of the forward pass whose node runs.

While `tracking_lines` is active, every autograd node gets a note of the line that made it.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from types import FrameType

from torch.autograd.graph import Node

from ..._torch.autograd_graph import in_backward_pass
from ..._torch.backward_pass import current_node
from ..._torch.node_notes import note_of, noting_nodes, recomputes, runs_backward
from ...sharding.shared import SharedContext
from ...sharding.source_lines import Line, is_library


class LineNote(str):
    """A line in the form in which PyTorch prints where a failing node was made."""

    line: Line | None


def tracking_lines() -> AbstractContextManager[None]:
    """Return a context in which autograd nodes, those of all threads, get a note of the lines that made them."""
    return _NOTING


def _note() -> LineNote:
    line = line_now()
    note = LineNote("" if line is None else f'  File "{line.path}", line {line.number}\n    {line.text}\n')
    note.line = line
    return note


_NOTING = SharedContext(lambda: noting_nodes(_note))


def line_now() -> Line | None:
    """Return the user's line that runs now; in a backward pass, that which made the running node. None if unknown."""
    frame = users_frame_now()
    if frame is None:
        return line_of_node(current_node())
    return Line.of(frame)


def line_of_node(node: Node | None) -> Line | None:
    """Return the line that made an autograd node; None if lines were not tracked then."""
    note = note_of(node)
    return note.line if isinstance(note, LineNote) else None


def users_frame_now() -> FrameType | None:
    """Return the user's innermost frame, also in recomputed forward code; None in a derivative formula."""
    frame: FrameType | None = sys._getframe(1)
    found: FrameType | None = None
    backward = in_backward_pass()
    while frame is not None:
        if runs_backward(frame):
            return None
        if found is not None and recomputes(frame):
            return found
        if found is None and (not is_library(frame.f_code.co_filename) or frame.f_back is None):
            found = frame
            if not backward:
                return found
        frame = frame.f_back
    return None  # a thread in which autograd runs the nodes of a device
