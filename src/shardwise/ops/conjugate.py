"""Conjugates and negatives that PyTorch keeps as a bit on the tensor: on a rank's part they are computed at once.

The wrapper of a distributed tensor has no such bit, and communication would move the memory without it.
"""

from __future__ import annotations

from torch import Tensor

from .kernel import LocalCall
from .tables import COPIED, LOCAL


def conjugate(call: LocalCall) -> Tensor:
    """The conjugate, in memory of its own."""
    return call["self"].conj_physical()


def negative(call: LocalCall) -> Tensor:
    """The negative, in memory of its own."""
    return call["self"].neg()


LOCAL["aten::_conj"], LOCAL["aten::_neg_view"] = conjugate, negative
COPIED.update(("aten::_conj", "aten::_neg_view"))
