"""The tensor subclass that PyTorch's functional collectives return before their data has arrived."""

from __future__ import annotations

from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor


def wait_for_data(tensor: Tensor) -> Tensor:
    """Return the plain tensor, after waiting for the collective that fills it if there is one."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor
