"""Distributed tensors without dims, where they meet what is not on their mesh: there they are numbers.

A value without dims is the same on all ranks once it is reduced. So it may scale a plain tensor, or meet one of another
mesh, as a plain tensor without dims may. The norm of gradients of several meshes, some of them plain, is such a value.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from .._torch import pytree
from ..world import RankTensor
from ..world.agreement import same


def with_numbers(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    kind: type[Any],
    written: Collection[Any],
    reduced: Callable[..., Any],
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments with distributed tensors of no dims as plain ones; None where there are none, or they are learnt.

    `reduced` gives the local part of such a tensor once it is whole on every rank.
    """
    flat, tree = pytree.tree_flatten((args, kwargs))
    if torch.is_grad_enabled() and any(isinstance(value, Tensor) and value.requires_grad for value in flat):
        return None  # the gradient of a number would have to go back to its mesh

    def number(value: Any) -> Any:
        if not isinstance(value, kind) or value.dim() or value in written:
            return value
        local = reduced(value)
        return local.shards[0] if isinstance(local, RankTensor) and same(local.shards) else local

    plain = [number(value) for value in flat]
    if all(new is old for new, old in zip(plain, flat, strict=True)):
        return None
    found: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_unflatten(plain, tree)
    return found
