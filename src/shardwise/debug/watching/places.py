"""Lines of the user's program: of a frame, of a thread, of an error."""

from __future__ import annotations

import sys
from types import FrameType

from ...sharding.source_lines import Line, is_library, users_frame


def line_of(frame: FrameType) -> str:
    """Return the line that a frame is at: `train.py:31   loss = y.sum()`."""
    return _text(Line.of(frame))


def line_of_thread(thread: int) -> tuple[str, bool]:
    """Return the user's line that a thread is at, and whether it is inside a library there, perhaps waiting."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "its thread has ended", False
    return line_of(users_frame(frame)), is_library(frame.f_code.co_filename)


def line_of_error(error: BaseException) -> str:
    """Return the user's line that raised an error: the innermost of its traceback that is not in a library."""
    lines = []
    step = error.__traceback__
    while step is not None:
        lines.append((step.tb_frame.f_code.co_filename, step.tb_lineno))
        step = step.tb_next
    own = [line for line in lines if not is_library(line[0])] or lines[-1:]
    return _text(Line.at(*own[-1])) if own else "an unknown line"


def _text(line: Line) -> str:
    return f"{line}   {line.text}".rstrip()
