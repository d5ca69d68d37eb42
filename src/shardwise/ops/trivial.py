"""Ops that compute nothing: views, allocations without values, and waits. Traces may leave them out."""

from __future__ import annotations

from .._torch.ops import OpOverload, schema_of

_WITHOUT_VALUES = frozenset(
    f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
)
_WAITS = frozenset(("_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd"))


def computes_nothing(func: OpOverload) -> bool:
    """Return whether an op returns a view or memory without values, or waits for a collective."""
    schema = schema_of(func)
    is_view = any(result.alias_info is not None and not result.alias_info.is_write for result in schema.returns)
    return is_view or schema.name in _WITHOUT_VALUES or schema.name in _WAITS
