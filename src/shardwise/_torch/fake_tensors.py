"""Fake tensors: tensors without data that say they are on a device, made and run by `FakeTensorMode`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["has_readable_values", "in_fake_mode", "is_fake"]


def in_fake_mode() -> bool:
    """Whether a `FakeTensorMode` is active in this thread: tensors that are made now have no data."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def is_fake(tensor: Tensor) -> bool:
    """Whether this is a fake tensor."""
    return isinstance(tensor, FakeTensor)


def has_readable_values(tensor: Tensor) -> bool:
    """Whether the elements can be looked at without waiting for a device, as PyTorch's kernels for the CPU do to check
    indices: a tensor on the CPU that has data."""
    return tensor.device.type == "cpu" and not isinstance(tensor, FakeTensor)
