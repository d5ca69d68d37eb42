"""Wrapper subclasses: tensors without memory that run every op through their class's `__torch_dispatch__`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "Placeholder",
    "counted_as",
    "make_wrapper",
    "no_torch_dispatch",
    "no_torch_function",
    "outside_inference_mode",
    "set_metadata",
    "settle_dtensor_class",
]

make_wrapper: Callable[..., Any] = torch.Tensor._make_wrapper_subclass
"""`make_wrapper(cls, shape, stride, offset, memory_format, dtype, layout, device)`: a `cls` tensor without memory.

Sizes and strides may be symbolic. PyTorch sets no attribute of it and does not call `cls.__new__`.
"""

no_torch_function: Callable[..., object] = torch._C._disabled_torch_function_impl
"""A `__torch_function__` with which functions run as on plain tensors, and results are not converted to the class."""

no_torch_dispatch: Callable[..., object] = torch._C._disabled_torch_dispatch_impl
"""The `__torch_dispatch__` of classes that do not define one."""


def outside_inference_mode() -> torch._C._InferenceMode:
    """Return a context without inference mode, in which new tensors have version counters."""
    return torch._C._InferenceMode(False)


def counted_as(wrapper: Tensor) -> Tensor:
    """Return an alias of a wrapper's local tensor, writes to which count as writes to the wrapper.

    Relies on `aten::_values`, an op for sparse tensors: the wrapper class returns its local tensor for it, and autograd
    treats the result as a view of the wrapper without a derivative, with the same version counter.
    """
    return wrapper._values()


def set_metadata(target: Tensor, source: Tensor) -> None:
    """Give a wrapper the sizes, strides, dtype and device of another one of its class.

    Relies on the setter of `Tensor.data`, which replaces the tensor's implementation, but not the Python object.
    """
    torch.Tensor.data.__set__(target, source)  # type: ignore[attr-defined]


class Placeholder(ModuleType):
    """A module that stands for `torch.distributed.tensor` while PyTorch's dispatcher looks for the class `DTensor`."""

    was_read = False

    @property
    def DTensor(self) -> type[Tensor]:
        """A class that no tensor has."""
        self.was_read = True

        class NoTensor(Tensor):
            pass

        return NoTensor


def settle_dtensor_class() -> None:
    """Make PyTorch's dispatcher cache a class that no tensor has as `torch.distributed.tensor.DTensor`.

    It imports that module and reads the class when it first dispatches a tensor subclass, and never again. The caller
    has put a `Placeholder` into sys.modules under that name. Nothing happens if PyTorch has read the class before.
    """

    class Nobody(Tensor):
        @classmethod
        def __torch_dispatch__(  # type: ignore[override]
            cls, func: object, types: object, args: Sequence[object] = (), kwargs: object = None
        ) -> object:
            return args[0]

    make_wrapper(Nobody, (1,), (1,)).detach()
