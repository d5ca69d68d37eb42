"""Which plain tensors are known to be the same on all ranks.

A plain tensor may meet distributed ones only if it is replicated. That is never guessed; it is recorded where it is
decided:

- the user says so for a block of code: `with implicit_replication():`;
- a derivative formula of PyTorch makes it, or takes one that its op accepted in forward: the formula's node of autograd
  is marked (`formulas`).

Everything else is an error: also in hooks and in functions of the user that run in a backward pass.
"""

from __future__ import annotations

from .formulas import in_formula
from .modes import modes


def takes_plain_as_replicated() -> bool:
    """Return whether plain tensors that meet distributed ones here are known to be the same on all ranks."""
    return modes.implicit_replication or in_formula()
