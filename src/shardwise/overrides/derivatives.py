"""Ops whose derivative formulas create plain tensors: their autograd nodes are marked.

See `dispatch.formulas` for what a mark does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from .._torch.above_autograd import Keys, call_with_autograd
from .._torch.ops import OpOverload, packet_name, schema_of
from ..dispatch.formulas import mark_formula, mark_join, mark_write
from ..ops.above_autograd import call, is_integer_view, is_ours, needs_grad
from ..sharding.base import DTensorBase


def marking_formulas(func: OpOverload) -> Callable[..., object]:
    """Return a kernel that runs an op and marks the autograd nodes that it records."""
    in_place = packet_name(func).endswith("_")
    takes_lists = any("List[" in str(argument.type) for argument in schema_of(func).arguments)
    makes_new_tensors = not any(argument.alias_info is not None for argument in schema_of(func).arguments)
    if [str(result.type) for result in schema_of(func).returns] == ["List[Tensor]"]:
        return _marking_pieces(func)

    def kernel(keys: Keys, *args: object, **kwargs: object) -> object:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if not any(isinstance(tensor, DTensorBase) for tensor in tensors):
            return call_with_autograd(func, keys, *args, **kwargs)
        if makes_new_tensors and not kwargs and not torch.is_grad_enabled() and is_ours(tensors):
            return call(func, *args)  # autograd has nothing to do
        if in_place and is_integer_view(tensors[0]):
            with torch.no_grad():
                return call_with_autograd(func, keys, *args, **kwargs)
        if not takes_lists and not needs_grad(tensors):
            return call_with_autograd(func, keys, *args, **kwargs)
        result = call_with_autograd(func, keys, *args, **kwargs)
        _mark(result, in_place)
        return result

    return kernel


def _marking_pieces(func: OpOverload) -> Callable[..., object]:
    """Return the kernel for an op that returns pieces of its first argument, such as `split`. It saves no tensor."""

    def kernel(keys: Keys, *args: object, **kwargs: object) -> object:
        pieces = cast(Sequence[Tensor], call_with_autograd(func, keys, *args, **kwargs))
        node = pieces[0].grad_fn if pieces and isinstance(args[0], DTensorBase) else None
        if node is not None:
            mark_join(node)  # all pieces have the same node
        return pieces

    return kernel


def _mark(result: object, in_place: bool) -> None:
    """Mark the node that the results of a call share."""
    for tensor in result if isinstance(result, (tuple, list)) else (result,):
        if isinstance(tensor, Tensor):
            base = tensor._base if in_place else None
            node, mark = (tensor.grad_fn, mark_formula) if base is None else (base.grad_fn, mark_write)
            if node is not None:
                mark(node)
                return
