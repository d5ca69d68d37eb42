"""Derivative formulas of PyTorch that make plain tensors.

Such a tensor is the same on all ranks, and only the formula may bring one: a hook that the user put on the same node of
autograd may not. So the node that a call records is marked when it is made. Its prehook, which runs after the user's
tensor hooks, says that the formula begins, and its hook that it has ended. What the formula returns as a plain tensor
becomes a replicated one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node, saved_tensors_hooks

from .._torch import pytree
from .._torch.above_autograd import call_with_autograd, override_above_autograd
from .._torch.backward_pass import saved_tensor_hooks
from .._torch.ops import OpOverload
from ..dispatch.provenance import as_replicated, enter_formula, leave_formula, outside_formula
from ..notation.schema import overloads
from ..ops.derivatives import MAKES_TENSORS
from ..sharding.base import DTensorBase

Gradients = tuple[Tensor | None, ...]


def install_derivatives() -> None:
    """Mark the nodes of the ops whose formulas make tensors, from now on."""
    for name in MAKES_TENSORS:
        op, _, only = name.partition(".")
        for func in (*overloads(op), *overloads(f"{op}_")):
            is_meant = not only or func._overloadname == only
            if is_meant and not any(argument.is_out for argument in func._schema.arguments):
                override_above_autograd(func, _marking(func))


def _marking(func: OpOverload) -> Callable[..., Any]:
    in_place = func._schema.name.endswith("_")

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(value, DTensorBase) for value in pytree.tree_leaves((args, kwargs))):
            return call_with_autograd(func, keys, *args, **kwargs)
        with _unpacking_outside_formulas():
            result = call_with_autograd(func, keys, *args, **kwargs)
        for node in {_node_of(tensor, in_place) for tensor in pytree.tree_leaves(result) if isinstance(tensor, Tensor)}:
            if node is not None:
                node.register_prehook(_begin)
                node.register_hook(_end)
        return result

    return kernel


def _node_of(result: Tensor, in_place: bool) -> Node | None:
    """The node that a call recorded. A write to a view is recorded on the tensor that it views."""
    written = result._base if in_place and result._base is not None else result
    return written.grad_fn


def _begin(grad_outputs: Gradients) -> None:
    enter_formula()


def _end(grad_inputs: Gradients, grad_outputs: Gradients) -> Gradients | None:
    leave_formula()
    like = next((g for g in grad_outputs if isinstance(g, DTensorBase)), None)
    if like is None or all(g is None or isinstance(g, DTensorBase) for g in grad_inputs):
        return None
    return tuple(g if g is None or isinstance(g, DTensorBase) else as_replicated(g, like) for g in grad_inputs)


@contextmanager
def _unpacking_outside_formulas() -> Iterator[None]:
    """Inside, a user's unpack hook for tensors that are saved will not count as part of a formula.

    Autograd calls it from the formula, and `torch.utils.checkpoint` recomputes the user's forward in one.
    """
    hooks = saved_tensor_hooks()
    if hooks is None:
        yield
        return
    pack, unpack = hooks

    def unpack_outside(packed: Any) -> Any:
        with outside_formula():
            return unpack(packed)

    with saved_tensors_hooks(pack, unpack_outside):
        yield
