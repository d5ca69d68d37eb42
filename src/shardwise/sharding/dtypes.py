"""Properties of pairs of dtypes."""

import torch


def sums_alike(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether summing in `source` and then casting to `target` is the same as casting first, up to rounding.

    It is not for integers, which wrap around in another place, nor for a dtype that overflows elsewhere or rounds each
    operand more coarsely than the sum would be. bfloat16 has the range of float32, which adds its numbers up precisely.

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
