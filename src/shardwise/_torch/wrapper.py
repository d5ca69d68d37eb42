"""Tensors of a class of our own: wrappers that have a shape and a dtype but no memory."""

import torch

make_wrapper = torch.Tensor._make_wrapper_subclass
"""`make_wrapper(cls, shape, stride, offset, memory_format, dtype, layout, device)`: a tensor of class `cls` without
memory, whose ops go to the class's `__torch_dispatch__`."""

no_torch_function = torch._C._disabled_torch_function_impl
"""As the `__torch_function__` of a class: calls on its tensors go straight to the dispatcher."""

no_torch_dispatch = torch._C._disabled_torch_dispatch_impl
"""The `__torch_dispatch__` of classes that have none of their own."""


def outside_inference_mode() -> torch._C._InferenceMode:
    """A context in which tensors that are made count writes, though inference mode is on around it."""
    return torch._C._InferenceMode(False)
