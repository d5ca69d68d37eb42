"""Filling on a GPU in one pass: the same bits as `fill` computes, by the same operations, each rounded the same way.

Products and sums are not fused (`enable_fp_fusion=False`), and quotients and roots round to nearest, so the numbers do
not depend on the device. Where Triton is missing, `fill` does the same with PyTorch's ops, in several passes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .bits import Key, threshold
from .box import Box

kernels: Any
try:
    from . import triton_kernels as kernels
except ImportError:  # builds of PyTorch for CPUs come without Triton
    kernels = None

_FRACTION = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
_MAX_DIMS = 4
_BLOCKS = (2048, 1024, 512, 256)


def available(*tensors: Tensor) -> bool:
    """Return whether the kernels accept these tensors."""
    return kernels is not None and all(t.is_cuda and type(t) is Tensor and t.is_contiguous() for t in tensors)


def fill(out: Tensor, box: Box, key: Key, name: str, arguments: tuple[float, ...]) -> bool:
    """Fill the tensor if there is a kernel for this op and dtype, and return whether there was."""
    if not available(out) or not isinstance(key.first, int):
        return False
    kind = _kind(out.dtype, name, arguments)
    return kind is not None and _launch(kernels.fill, box, key, (out,), kind)


def dropout(x: Tensor, box: Box, key: Key, p: float) -> tuple[Tensor, Tensor] | None:
    """Return `native_dropout` of these elements, computed in one pass; None if there is no kernel for this dtype."""
    if not available(x) or not isinstance(key.first, int) or x.dtype not in _FRACTION:
        return None
    out, mask = torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)
    scalars = {"limit": threshold(1.0 - p), "scale": 1.0 / (1.0 - p)}
    done = _launch(kernels.dropout, box, key, (x, out, mask.view(torch.uint8)), scalars)
    return (out, mask) if done else None


def _kind(dtype: torch.dtype, name: str, arguments: tuple[float, ...]) -> dict[str, float] | None:
    """Return the kernel's arguments for this op: two numbers, and the constants KIND and BITS; None if it has none."""
    if name == "uniform_" and dtype in _FRACTION:
        low, high = arguments
        return {"scale": float(high - low), "plus": float(low), "KIND": kernels.UNIFORM, "BITS": _FRACTION[dtype]}
    if name == "normal_" and dtype in _FRACTION:
        mean, std = arguments
        return {"scale": float(std), "plus": float(mean), "KIND": kernels.NORMAL, "BITS": 24}
    if name == "exponential_" and dtype in _FRACTION:
        return {"scale": float(arguments[0]), "plus": 0.0, "KIND": kernels.EXPONENTIAL, "BITS": 24}
    if name == "bernoulli_" and 0 <= arguments[0] < 1 and dtype != torch.bool:
        return {"scale": threshold(arguments[0]), "plus": 0, "KIND": kernels.BERNOULLI, "BITS": 24}
    if name == "random_" and arguments[1] - arguments[0] <= 1 << 20 and dtype != torch.bool:
        return {"scale": arguments[1] - arguments[0], "plus": arguments[0], "KIND": kernels.INTEGERS, "BITS": 24}
    return None


def _block(row: int) -> int:
    """Return a block size that wastes little at the end of a row; 0 for short rows, several of which share a block."""
    return next((block for block in _BLOCKS if -row % block <= row // 8), 0)


def _launch(kernel: Any, box: Box, key: Key, tensors: tuple[Tensor, ...], options: dict[str, float]) -> bool:
    """Run a kernel on a box, in blocks of one row of its last dim unless rows are short; return False if it cannot."""
    dims, count = len(box.sizes), box.numel
    if dims > _MAX_DIMS or count >= 2**31 - _BLOCKS[0]:
        return False
    if not count:
        return True
    _, *outer, last = (*(1,) * (_MAX_DIMS - dims), *box.sizes)
    strides = (*(0,) * (_MAX_DIMS - dims), *box.strides)
    align = math.gcd(last, 16)
    rows = dims == 1 or _block(last) > 0
    block = _block(last) or _BLOCKS[0]
    blocks = -(-last // block)
    programs = count // last * blocks if rows else -(-count // block)
    with torch.cuda.device_of(tensors[0]):
        kernel[(programs,)](
            *tensors,
            key.first,
            key.second,
            count,
            *outer,
            last // align,
            *strides,
            box.offset,
            blocks,
            **options,
            DIMS=dims,
            ROWS=rows,
            EVEN=box.halved() is not None,
            ALIGN=align,
            BLOCK=block,
            num_warps=max(1, block // 512),
            enable_fp_fusion=False,
        )
    return True
