"""Ops that are cheaply expressed by others: a short list, after the rules and before running whole.

PyTorch has decompositions for hundreds of ops, but in eager most are many times slower than the op. Those listed here
cost about what the op costs. `INSTEAD` holds further ones, next to the kernels they are made of.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from .registry import INSTEAD
from .schema import overload_key, packet_name, variant_of

aten = torch.ops.aten

FROM_PYTORCH = (
    "aten::_unsafe_masked_index.default",  # index, where
    "aten::_unsafe_masked_index_put_accumulate.default",  # masked_fill, index_put
    "aten::channel_shuffle.default",  # view, transpose, view
    "aten::_euclidean_dist.default",  # cat, matmul
)
"""Ops that are taken apart as PyTorch's own table of decompositions says."""


@lru_cache(maxsize=4096)
def instead_of(func: OpOverload) -> Callable[..., Any] | None:
    """What runs instead of an op: a function of the same arguments that calls other ops; None if there is none."""
    key = overload_key(func)
    if key in INSTEAD:
        return INSTEAD[key]
    if key in FROM_PYTORCH:
        return _pytorch(func)
    return _copied_view(func)


def _pytorch(func: OpOverload) -> Callable[..., Any] | None:
    from torch._decomp import decomposition_table

    found: Callable[..., Any] | None = decomposition_table.get(func)
    return found


def _copied_view(func: OpOverload) -> Callable[..., Any] | None:
    """`view_copy` and its like: the view, copied."""
    name = packet_name(func)
    if not name.endswith("_copy") or variant_of(func) != "functional":
        return None
    packet = getattr(aten, name.removeprefix("aten::").removesuffix("_copy"), None)
    view = getattr(packet, func._overloadname, None)
    if view is None or [a.name for a in view._schema.arguments] != [a.name for a in func._schema.arguments]:
        return None

    def copied(*args: Any, **kwargs: Any) -> Any:
        result = view(*args, **kwargs)
        return result.clone() if isinstance(result, Tensor) else [piece.clone() for piece in result]

    return copied
