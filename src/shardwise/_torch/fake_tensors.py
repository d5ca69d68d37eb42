"""Fake tensors: tensors without data that say they are on a device, made and run by `FakeTensorMode`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from .modes import count_modes

__all__ = ["STAND_INS", "has_readable_values", "in_fake_mode", "is_fake", "is_recorded", "is_traced"]


STAND_INS = (FakeTensor, FunctionalTensor)
"""The classes of tensors that stand for plain ones while ops are traced."""


def in_fake_mode() -> bool:
    """Whether a `FakeTensorMode` is active in this thread: tensors that are made now have no data."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def is_traced() -> bool:
    """Whether ops are recorded in this thread (`torch.compile`, `make_fx`, `torch.export`) or run on fake tensors.

    Values then cannot be read, and must not be: the recording would hold them for ever.
    """
    return count_modes() > 0 and (in_fake_mode() or is_recorded())


def is_recorded() -> bool:
    """Whether ops are being recorded in this thread, as opposed to run on fake tensors for their shapes alone."""
    key = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(kind) is not None for kind in (key.PROXY, key.FUNCTIONAL))


def is_fake(tensor: Tensor) -> bool:
    """Whether this is a fake tensor, or stands for one that is being traced."""
    return isinstance(tensor, FakeTensor) or is_traced()


def has_readable_values(tensor: Tensor) -> bool:
    """Whether the elements can be looked at without waiting for a device, as PyTorch's kernels for the CPU do to check
    indices: a tensor on the CPU that has data."""
    return tensor.device.type == "cpu" and not is_fake(tensor)
