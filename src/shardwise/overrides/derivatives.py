"""Ops whose derivative formulas make plain tensors: the nodes of autograd that they record are marked.

See `dispatch.formulas` for what a mark does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node, saved_tensors_hooks

from .._torch.above_autograd import call_with_autograd, override_above_autograd
from .._torch.backward_pass import saved_tensor_hooks
from .._torch.ops import OpOverload
from ..dispatch.formulas import mark_formula, outside_formula
from ..notation.schema import overloads
from ..ops.derivatives import MAKES_TENSORS
from ..sharding.base import DTensorBase
from .call import call, is_ours


def install_derivatives() -> None:
    """Mark the nodes of these ops, and of their in-place variants, from now on."""
    for name in MAKES_TENSORS:
        for func in (*overloads(name), *overloads(f"{name}_")):
            if not any(argument.is_out for argument in func._schema.arguments):
                override_above_autograd(func, _marking(func))


def _marking(func: OpOverload) -> Callable[..., Any]:
    in_place = func._schema.name.endswith("_")
    makes_new_tensors = not any(argument.alias_info is not None for argument in func._schema.arguments)

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if not any(isinstance(tensor, DTensorBase) for tensor in tensors):
            return call_with_autograd(func, keys, *args, **kwargs)
        if makes_new_tensors and not kwargs and not torch.is_grad_enabled() and is_ours(tensors):
            return call(func, *args)  # autograd has nothing to do
        with _unpacking_outside_formulas():
            result = call_with_autograd(func, keys, *args, **kwargs)
        for node in {_node_of(tensor, in_place) for tensor in _tensors(result)}:
            if node is not None:
                mark_formula(node)
        return result

    return kernel


def _tensors(result: Any) -> Sequence[Tensor]:
    found = result if isinstance(result, (tuple, list)) else (result,)
    return [value for value in found if isinstance(value, Tensor)]


def _node_of(result: Tensor, in_place: bool) -> Node | None:
    """The node that a call recorded. A write to a view is recorded on the tensor that it views."""
    written = result._base if in_place and result._base is not None else result
    return written.grad_fn


def _unpacking_outside_formulas() -> AbstractContextManager[object]:
    """Inside, a user's unpack hook for tensors that are saved will not count as part of the formula that calls it."""
    hooks = saved_tensor_hooks()
    if hooks is None:
        return nullcontext()
    pack, unpack = hooks

    def unpack_outside(packed: Any) -> Any:
        with outside_formula():
            return unpack(packed)

    return saved_tensors_hooks(pack, unpack_outside)
