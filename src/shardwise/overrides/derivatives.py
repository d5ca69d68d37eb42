"""Ops whose derivative formulas make plain tensors: the nodes of autograd that they record are marked.

See `dispatch.formulas` for what a mark does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

from torch import Tensor
from torch.autograd.graph import Node, saved_tensors_hooks

from .._torch import pytree
from .._torch.above_autograd import Keys, call_with_autograd
from .._torch.backward_pass import saved_tensor_hooks
from .._torch.ops import OpOverload
from ..dispatch.formulas import mark_formula, outside_formula
from ..sharding.base import DTensorBase


def marking_formulas(func: OpOverload) -> Callable[..., object]:
    """The kernel that runs an op and marks the nodes that autograd records for it."""
    in_place = func._schema.name.endswith("_")

    def kernel(keys: Keys, *args: object, **kwargs: object) -> object:
        if not any(isinstance(value, DTensorBase) for value in pytree.tree_leaves((args, kwargs))):
            return call_with_autograd(func, keys, *args, **kwargs)
        with _unpacking_outside_formulas():
            result = call_with_autograd(func, keys, *args, **kwargs)
        for node in {_node_of(tensor, in_place) for tensor in pytree.tree_leaves(result) if isinstance(tensor, Tensor)}:
            if node is not None:
                mark_formula(node)
        return result

    return kernel


def _node_of(result: Tensor, in_place: bool) -> Node | None:
    """The node that a call recorded. A write to a view is recorded on the tensor that it views."""
    written = result._base if in_place and result._base is not None else result
    return written.grad_fn


@contextmanager
def _unpacking_outside_formulas() -> Iterator[None]:
    """Inside, a user's unpack hook for tensors that are saved will not count as part of the formula that calls it."""
    hooks = saved_tensor_hooks()
    if hooks is None:
        yield
        return
    pack, unpack = hooks

    def unpack_outside(packed: object) -> Tensor:
        with outside_formula():
            return cast(Tensor, unpack(packed))

    with saved_tensors_hooks(pack, unpack_outside):
        yield
