"""Find the line of the user's program that is running."""

from __future__ import annotations

import linecache
import os
import sys
from functools import cache
from types import FrameType

import torch
import torch.distributed.device_mesh

_LIBRARIES = (os.path.dirname(os.path.dirname(__file__)) + os.sep, os.path.dirname(torch.__file__) + os.sep)

_PYTHON = os.path.dirname(os.__file__) + os.sep
_MESH = torch.distributed.device_mesh.__file__


_library_files: set[str] = set()
"""The files for which `is_library` has returned True: a look-up in a set costs less than the call."""

RECORDED_LINES = "__recorded_lines__"
"""The global of generated code with the user's lines: `{1: train.py:31, 7: train.py:32}` by first generated line."""


class Line(str):
    """`train.py:31`, with the path of the file, the number, and the text of the line."""

    path: str
    number: int
    text: str

    @staticmethod
    def at(path: str, number: int) -> Line:
        """Return the line with this number of a file."""
        line = Line(f"{os.path.basename(path)}:{number}")
        line.path, line.number = path, number
        line.text = linecache.getline(path, number).strip()
        return line

    @staticmethod
    def of(frame: FrameType) -> Line:
        """Return the line that a frame runs; in generated code, the user's line that it was generated from."""
        recorded: dict[int, Line] = frame.f_globals.get(RECORDED_LINES, {})
        before = [number for number in recorded if number <= frame.f_lineno]
        return recorded[max(before)] if before else Line.at(frame.f_code.co_filename, frame.f_lineno)


def users_line() -> Line:
    """Return the innermost line that runs and is not shardwise's, PyTorch's or Python's own."""
    return Line.of(users_frame(sys._getframe(1)))


def users_frame(frame: FrameType) -> FrameType:
    """Return the innermost frame, from this one outwards, that is not shardwise's, PyTorch's or Python's own."""
    while frame.f_code.co_filename in _library_files or is_library(frame.f_code.co_filename):
        outer = frame.f_back
        if outer is None:
            break
        frame = outer
    return frame


def in_mesh_code() -> bool:
    """Return whether the user's line runs PyTorch's code of DeviceMesh.

    It reads tensors of ranks, which never change.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and is_library(frame.f_code.co_filename):
        if frame.f_code.co_filename == _MESH:
            return True
        frame = frame.f_back
    return False


@cache
def is_library(path: str) -> bool:
    """Return whether a file is part of shardwise, of PyTorch, or of Python itself."""
    found = path.startswith((*_LIBRARIES, "<frozen")) or (path.startswith(_PYTHON) and "site-packages" not in path)
    if found:
        _library_files.add(path)
    return found


def called_by_user(*, directly: bool = False) -> bool:
    """Return whether the user's code called the present function, directly or through PyTorch, and not shardwise."""
    frame = sys._getframe(2)
    while not directly and frame.f_back is not None and _is_torch(frame.f_code.co_filename):
        if frame.f_code.co_filename == _MESH:
            return False
        frame = frame.f_back
    return not is_library(frame.f_code.co_filename)


def _is_torch(path: str) -> bool:
    return not path.startswith(_LIBRARIES[0]) and is_library(path)
