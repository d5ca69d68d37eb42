"""Ops that compute nothing: views, allocations without values, and waits. Traces may leave them out."""

from __future__ import annotations

from .._torch.ops import OpOverload, packet_name
from .schema import returns_view

_WITHOUT_VALUES = frozenset(
    f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
)
_WAITS = frozenset(("_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd"))


def computes_nothing(func: OpOverload) -> bool:
    """Return whether an op returns a view or memory without values, or waits for a collective."""
    name = packet_name(func)
    return returns_view(func) or name in _WITHOUT_VALUES or name in _WAITS
