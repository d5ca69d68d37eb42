"""Recognize PyTorch's own functions between the caller of an op and the tensor class."""

from __future__ import annotations

import os
from types import CodeType

import torch
from torch._ops import OpOverload

__all__ = ["passes_ops_on"]

_FOLDER = os.path.dirname(torch.__file__)
_FILES = frozenset((os.path.join(_FOLDER, "_compile.py"), os.path.join(_FOLDER, "_dynamo", "eval_frame.py")))
_CALL_OP = getattr(OpOverload.__call__, "__code__", None)


def passes_ops_on(code: CodeType) -> bool:
    """Return whether a function only forwards an op: `OpOverload.__call__`, dispatch modes, wrappers around them.

    Relies on `_compile.py` and `_dynamo/eval_frame.py` being the files of the wrappers.
    """
    return code is _CALL_OP or code.co_name == "__torch_dispatch__" or code.co_filename in _FILES
