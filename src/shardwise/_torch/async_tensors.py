"""The tensor subclass that PyTorch's functional collectives return before their data has arrived."""

from __future__ import annotations

from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor


def wait_for_data(tensor: Tensor) -> Tensor:
    """Return a plain tensor, after waiting for its data if this is the result of a functional collective."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor
