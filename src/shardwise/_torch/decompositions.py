"""PyTorch's own decompositions of ops."""

from __future__ import annotations

import sys
from collections.abc import Callable

from .ops import OpOverload


def pytorch_decomposition(func: OpOverload) -> Callable[..., object]:
    """Return PyTorch's decomposition of an op, from the table of `torch._decomp`.

    The table takes a quarter of a second to import, so it is imported when the function is first called.
    """

    def decomposed(*args: object, **kwargs: object) -> object:
        from torch._decomp import decomposition_table

        return decomposition_table[func](*args, **kwargs)

    return decomposed


def registered_decomposition(func: OpOverload) -> Callable[..., object] | None:
    """Return the decomposition that a program registered for its own op (`torch._decomp.register_decomposition`).

    None if there is none, and for ops of PyTorch: its own decompositions are made for tracing, and make plain tensors.
    """
    module = sys.modules.get("torch._decomp")  # a program imports it to register a decomposition
    if module is None or func.namespace in ("aten", "prims"):
        return None
    found: Callable[..., object] | None = module.decomposition_table.get(func)
    return found
