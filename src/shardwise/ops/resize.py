"""Tensors that change their shape in place: the numbers they begin with stay, in row-major order.

What is beyond them is left undefined by PyTorch, and zero here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from .tables import INSTEAD


def _resized(x: Any, size: Sequence[int], *, memory_format: torch.memory_format | None = None) -> Any:
    if not x.is_contiguous() or memory_format not in (None, torch.contiguous_format, torch.preserve_format):
        return NotImplemented
    if tuple(size) != tuple(x.shape):
        flat, count = x.reshape(-1), math.prod(size)
        missing = count - flat.numel()
        flat = torch.cat([flat, flat.new_zeros(missing)]) if missing > 0 else flat[:count]
        x.data = flat.view(size)
    return x


def _resized_as(x: Any, other: Any, *, memory_format: torch.memory_format | None = None) -> Any:
    return _resized(x, other.shape, memory_format=memory_format)


INSTEAD["aten::resize_.default"] = _resized
INSTEAD["aten::resize_as_.default"] = _resized_as
