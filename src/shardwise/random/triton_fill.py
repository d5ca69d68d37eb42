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
_BLOCK = 1024
_MAX_DIMS = 4


def available(*tensors: Tensor) -> bool:
    """Whether these tensors are of a kind that the kernels take."""
    return kernels is not None and all(t.is_cuda and type(t) is Tensor and t.is_contiguous() for t in tensors)


def fill(out: Tensor, box: Box, key: Key, name: str, arguments: tuple[Any, ...]) -> bool:
    """Fill the tensor if there is a kernel for this; whether there was."""
    if not available(out) or not isinstance(key.first, int):
        return False
    kind = _kind(out.dtype, name, arguments)
    if kind is None:
        return False
    # A number that a rank does not hold leaves half a pair: then each element makes its own.
    halved = box.halved()
    return _launch(kernels.fill, halved or box, halved is not None, key, (out,), kind)


def dropout(x: Tensor, box: Box, key: Key, p: float) -> tuple[Tensor, Tensor] | None:
    """`native_dropout` of these elements, in one pass; None if there is no kernel for this."""
    if not available(x) or not isinstance(key.first, int) or not x.dtype.is_floating_point or x.dtype.itemsize > 4:
        return None
    out, mask = torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)
    halved = box.halved()
    limit = math.floor((1.0 - p) * 2.0**32) - 2**31
    scalars = {"limit": limit, "scale": 1.0 / (1.0 - p)}
    if not _launch(kernels.dropout, halved or box, halved is not None, key, (x, out, mask.view(torch.uint8)), scalars):
        return None
    return out, mask


def _kind(dtype: torch.dtype, name: str, arguments: tuple[Any, ...]) -> dict[str, Any] | None:
    """What tells this fill from others: constants of the kernel and its two numbers."""
    if name == "uniform_" and dtype in _FRACTION:
        low, high = arguments
        return {"scale": float(high - low), "plus": float(low), "KIND": kernels.UNIFORM, "BITS": _FRACTION[dtype]}
    if name == "normal_" and dtype in _FRACTION:
        mean, std = arguments
        return {"scale": float(std), "plus": float(mean), "KIND": kernels.NORMAL, "BITS": 24}
    if name == "bernoulli_" and 0 <= arguments[0] < 1 and dtype != torch.bool:
        limit = math.floor(arguments[0] * 2.0**32) - 2**31
        return {"scale": limit, "plus": 0, "KIND": kernels.BERNOULLI, "BITS": 24}
    if name == "random_" and arguments[1] - arguments[0] <= 1 << 20 and dtype != torch.bool:
        return {"scale": arguments[1] - arguments[0], "plus": arguments[0], "KIND": kernels.INTEGERS, "BITS": 24}
    return None


def _launch(
    kernel: Any, box: Box, paired: bool, key: Key, tensors: tuple[Tensor, ...], options: dict[str, Any]
) -> bool:
    dims, count = len(box.sizes), box.numel
    if dims > _MAX_DIMS or count >= 2**31 - _BLOCK:
        return False
    if count:
        sizes = (*(1,) * (_MAX_DIMS - dims), *box.sizes)[1:]
        strides = (*(0,) * (_MAX_DIMS - dims), *box.strides)
        places = dict(zip(("n1", "n2", "n3", "s0", "s1", "s2", "s3"), (*sizes, *strides), strict=True))
        with torch.cuda.device_of(tensors[0]):
            kernel[(-(-count // _BLOCK),)](
                *tensors,
                count,
                key.first,
                key.second,
                box.offset,
                **places,
                **options,
                DIMS=dims,
                PAIRED=paired,
                BLOCK=_BLOCK,
                enable_fp_fusion=False,
            )
    return True
