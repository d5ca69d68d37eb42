"""PyTorch's own decompositions of ops."""

from __future__ import annotations

import sys
from collections.abc import Callable

from .ops import OpOverload


def pytorch_decomposition(func: OpOverload) -> Callable[..., object]:
    """The function that PyTorch's table of decompositions (`torch._decomp`) holds for an op.

    The table takes a quarter of a second to import, so that happens when the function is first called.
    """

    def decomposed(*args: object, **kwargs: object) -> object:
        from torch._decomp import decomposition_table

        return decomposition_table[func](*args, **kwargs)

    return decomposed


def registered_decomposition(func: OpOverload) -> Callable[..., object] | None:
    """The decomposition that a program registered for an op of its own, with `torch._decomp.register_decomposition`.

    Ops of PyTorch have none here: its table is made for tracing, and holds functions that make plain tensors.
    """
    module = sys.modules.get("torch._decomp")  # nothing is registered before it is imported
    if module is None or func.namespace in ("aten", "prims"):
        return None
    found: Callable[..., object] | None = module.decomposition_table.get(func)
    return found
