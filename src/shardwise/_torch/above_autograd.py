"""Kernels above autograd, for functions that PyTorch takes apart before a tensor class sees them.

They stand at the dispatch key that tensor classes have and plain tensors lack. A kernel sees the tensors of all such
classes, and passes on what is not its own.

>>> stand_above(torch.ops.aten.linear.default, lambda keys, *args: pass_on(torch.ops.aten.linear.default, keys, *args))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey

from . import pytree
from .modes import pop_mode
from .ops import OpOverload

_HERE = DispatchKey.PythonTLSSnapshot
_modes = torch._C._len_torch_dispatch_stack
_libraries: dict[str, torch.library.Library] = {}


def override_above_autograd(func: OpOverload, kernel: Callable[..., Any]) -> None:
    """Let this run in the place of a function, as `kernel(keys, *args, **kwargs)`."""
    space = func.namespace
    if space not in _libraries:
        _libraries[space] = torch.library.Library(space, "IMPL")
    _libraries[space].impl(func.name(), kernel, _HERE.name, with_keyset=True)


def call_original(func: OpOverload, keys: Any, *args: Any, **kwargs: Any) -> Any:
    """The function, as if no kernel stood above it."""
    below = keys.remove(_HERE)
    if below.highestPriorityTypeId() != DispatchKey.Python:
        return func.redispatch(below, *args, **kwargs)
    return dispatch_to_subclass(func, args, kwargs)


def dispatch_to_subclass(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The function at the class of its tensors, or at the mode that comes first.

    Dispatching to either from a kernel that stands here fails in PyTorch 2.11: it misses what it notes on entry.
    """
    classes = dict.fromkeys(type(value) for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor))
    types = tuple(cls for cls in classes if cls.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl)
    if _modes():
        with pop_mode() as mode:
            result = mode.__torch_dispatch__(func, types, args, kwargs)
        if result is not NotImplemented:
            return result
    most_special = next(cls for cls in types if not any(issubclass(other, cls) for other in types if other is not cls))
    return most_special.__torch_dispatch__(func, types, args, kwargs)
