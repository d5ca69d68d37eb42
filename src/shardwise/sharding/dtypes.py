"""Properties of pairs of dtypes."""

import torch


def sums_alike(source: torch.dtype, target: torch.dtype) -> bool:
    """Return whether summing in `source` and then casting to `target` is the same as casting first, up to rounding.

    It is not for integers, which wrap around at another size, nor for dtypes of different range, nor if casting rounds
    each operand. It is from bfloat16 to float32, which have the same range.

    >>> sums_alike(torch.float32, torch.complex64), sums_alike(torch.int32, torch.int64)
    (True, False)
    >>> sums_alike(torch.bfloat16, torch.float32), sums_alike(torch.float32, torch.bfloat16)
    (True, False)
    """
    if source == target:
        return True
    if not all(dtype.is_floating_point or dtype.is_complex for dtype in (source, target)):
        return False
    one, other = source.to_real(), target.to_real()
    return one == other or (one is torch.bfloat16 and other is torch.float32)
