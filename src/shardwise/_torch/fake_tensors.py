"""Tensors without data: on the meta device, or fake ones, which report a real device and run in `FakeTensorMode`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from .modes import count_modes

__all__ = ["STAND_INS", "has_readable_values", "in_fake_mode", "is_fake", "is_recorded", "is_traced", "on_meta"]


STAND_INS = (FakeTensor, FunctionalTensor)
"""The classes of tensors that stand for plain ones while ops are traced."""


def on_meta(tensor: Tensor) -> Tensor:
    """Return a tensor on the meta device with the shape, strides and dtype of this one."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def in_fake_mode() -> bool:
    """Return whether a `FakeTensorMode` is active in this thread, so that new tensors have no data."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def is_traced() -> bool:
    """Return whether ops are recorded in this thread (`torch.compile`, `make_fx`, export) or run on fake tensors.

    Values cannot be read then, and must not be: the recording would hold them as constants.
    """
    return count_modes() > 0 and (in_fake_mode() or is_recorded())


def is_recorded() -> bool:
    """Return whether ops are being recorded in this thread, not only run on fake tensors for their shapes."""
    key = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(kind) is not None for kind in (key.PROXY, key.FUNCTIONAL))


def is_fake(tensor: Tensor) -> bool:
    """Return whether this is a fake tensor, or ops are being traced in this thread."""
    return isinstance(tensor, FakeTensor) or is_traced()


def has_readable_values(tensor: Tensor) -> bool:
    """Return whether a tensor is on the CPU and has data, so that elements can be read without waiting for a device.

    PyTorch's kernels for the CPU read indices to check them.
    """
    return tensor.device.type == "cpu" and not is_fake(tensor)
