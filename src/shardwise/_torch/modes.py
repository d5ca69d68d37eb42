"""Dispatch modes: objects on a stack that see every op before the tensors' own classes do."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch._ops import _len_torch_dispatch_stack_pre_dispatch as _count_modes_before_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._python_dispatch import _disable_current_modes as _disable_modes
from torch.utils._python_dispatch import _pop_mode_temporarily as pop_mode

__all__ = ["OwnMode", "TorchDispatchMode", "count_modes", "expects_pytorch_ops", "pop_mode", "without_modes"]

count_modes = torch._C._len_torch_dispatch_stack
"""How many modes are on the stack of this thread."""

_NO_MODES: AbstractContextManager[object] = nullcontext()


def without_modes() -> AbstractContextManager[object]:
    """Return a context in which no mode sees ops. It costs nothing if no mode is active, as in eager programs."""
    return _disable_modes() if count_modes() or _count_modes_before_dispatch() else _NO_MODES


class OwnMode(TorchDispatchMode):
    """Base class of shardwise's modes. They see the ops that run without them, shardwise's own ops included."""


def expects_pytorch_ops() -> bool:
    """Return whether a mode of other code is active.

    If it counts or caches `aten.mm`, it must see that, not an op of ours.
    """
    return any(not isinstance(mode, OwnMode) for mode in _get_current_dispatch_mode_stack())
