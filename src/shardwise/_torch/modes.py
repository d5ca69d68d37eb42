"""Dispatch modes: objects on a stack that see every op before the tensors' own classes do."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_modes
from torch.utils._python_dispatch import _pop_mode_temporarily as pop_mode

__all__ = ["TorchDispatchMode", "count_modes", "pop_mode", "without_modes"]

count_modes = torch._C._len_torch_dispatch_stack
"""How many modes are on the stack of this thread."""
