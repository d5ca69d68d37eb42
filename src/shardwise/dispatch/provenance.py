"""Which plain tensors are known to be the same on all ranks.

A plain tensor may meet distributed ones only if it is replicated. That is never guessed; it is recorded where it is
decided:

- the user says so for a block of code: `with implicit_replication():`;
- a tensor that was accepted in forward comes back in backward, when autograd hands out what it saved: the tensor itself
  is recorded (`record_replicated`);
- a derivative formula of PyTorch makes it (`formulas`).

Everything else is an error: also in hooks and in functions of the user that run in a backward pass.
"""

from __future__ import annotations

from collections.abc import MutableMapping

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .._torch.backward_pass import current_node
from .formulas import in_formula
from .modes import modes

_recorded: MutableMapping[Tensor, bool] = WeakTensorKeyDictionary()
"""The plain tensors that were accepted, by identity. A view is recorded as the tensor that it views."""


def taken_as_replicated(tensor: Tensor) -> bool:
    """Whether a plain tensor that meets distributed ones here is known to be the same on all ranks."""
    if modes.implicit_replication:
        return True
    return current_node() is not None and (in_formula() or _root(tensor) in _recorded)


def record_replicated(tensor: Tensor) -> None:
    """Record that a plain tensor was accepted as replicated: autograd may have saved it for backward."""
    _recorded[_root(tensor)] = True


def _root(tensor: Tensor) -> Tensor:
    base = tensor._base
    return tensor if base is None else base
