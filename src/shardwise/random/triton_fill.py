"""The fills on a GPU in one pass: the same bits as `fill` makes, by the same operations, each rounded alike.

Products and sums are not fused (`enable_fp_fusion=False`), quotients and roots round to nearest: so a number does not
depend on the device. Where Triton is missing, `fill` does the same with PyTorch's ops, in more passes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .bits import Key
from .box import Box

kernels: Any
try:
    from . import triton_kernels as kernels
except ImportError:  # a PyTorch for CPUs comes without Triton
    kernels = None

_FRACTION = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
_MAX_DIMS = 4
_BLOCKS = (2048, 1024, 512, 256)


def available(*tensors: Tensor) -> bool:
    """Whether these tensors are of a kind that the kernels take."""
    return kernels is not None and all(t.is_cuda and type(t) is Tensor and t.is_contiguous() for t in tensors)


def fill(out: Tensor, box: Box, key: Key, name: str, arguments: tuple[Any, ...]) -> bool:
    """Fill the tensor if there is a kernel for this; whether there was."""
    if not available(out) or not isinstance(key.first, int):
        return False
    kind = _kind(out.dtype, name, arguments)
    return kind is not None and _launch(kernels.fill, box, key, (out,), kind)


def dropout(x: Tensor, box: Box, key: Key, p: float) -> tuple[Tensor, Tensor] | None:
    """`native_dropout` of these elements, in one pass; None if there is no kernel for this."""
    if not available(x) or not isinstance(key.first, int) or x.dtype not in _FRACTION:
        return None
    out, mask = torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)
    scalars = {"limit": _limit(1.0 - p), "scale": 1.0 / (1.0 - p)}
    done = _launch(kernels.dropout, box, key, (x, out, mask.view(torch.uint8)), scalars)
    return (out, mask) if done else None


def _kind(dtype: torch.dtype, name: str, arguments: tuple[Any, ...]) -> dict[str, Any] | None:
    """What tells this fill from others: constants of the kernel and its two numbers."""
    if name == "uniform_" and dtype in _FRACTION:
        low, high = arguments
        return {"scale": float(high - low), "plus": float(low), "KIND": kernels.UNIFORM, "BITS": _FRACTION[dtype]}
    if name == "normal_" and dtype in _FRACTION:
        mean, std = arguments
        return {"scale": float(std), "plus": float(mean), "KIND": kernels.NORMAL, "BITS": 24}
    if name == "exponential_" and dtype in _FRACTION:
        return {"scale": float(arguments[0]), "plus": 0.0, "KIND": kernels.EXPONENTIAL, "BITS": 24}
    if name == "bernoulli_" and 0 <= arguments[0] < 1 and dtype != torch.bool:
        return {"scale": _limit(arguments[0]), "plus": 0, "KIND": kernels.BERNOULLI, "BITS": 24}
    if name == "random_" and arguments[1] - arguments[0] <= 1 << 20 and dtype != torch.bool:
        return {"scale": arguments[1] - arguments[0], "plus": arguments[0], "KIND": kernels.INTEGERS, "BITS": 24}
    return None


def _limit(p: float) -> int:
    """The signed word below which a share p < 1 of all words lies."""
    return math.floor(p * 2.0**32) - 2**31


def _block(row: int) -> int:
    """The block that leaves little over of a row; 0 for a short one, which is better taken together with others."""
    return next((block for block in _BLOCKS if -row % block <= row // 8), 0)


def _launch(kernel: Any, box: Box, key: Key, tensors: tuple[Tensor, ...], options: dict[str, Any]) -> bool:
    """Run a kernel on a box, each row of its last dim in blocks of its own unless rows are short."""
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
