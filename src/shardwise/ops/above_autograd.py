"""Helpers of overrides above autograd: when they apply, and how they call ops below autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from .._torch.above_autograd import Keys, call_with_autograd, dispatch_to_subclass, tensors_in
from .._torch.modes import count_modes, expects_pytorch_ops
from .._torch.ops import OpOverload
from .._torch.transforms import anything_transforms
from ..errors import MixedTensorError
from ..sharding.base import DTensorBase
from .modes import modes


def are_distributed(tensors: Sequence[Tensor]) -> TypeGuard[Sequence[DTensorBase]]:
    """Return whether all tensors are distributed."""
    return all(isinstance(tensor, DTensorBase) for tensor in tensors)


def is_ours(tensors: Sequence[Tensor]) -> bool:
    """Return whether all tensors are distributed, and no transform, autocast or forward-mode AD is active."""
    for tensor in tensors:
        if not isinstance(tensor, DTensorBase):
            return False
    return not anything_transforms()


def needs_grad(tensors: Sequence[Tensor]) -> bool:
    """Return whether autograd has to record an op on these tensors."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor.requires_grad:
                return True
    return False


def is_watched() -> bool:
    """Return whether a dispatch mode that is not ours is active.

    It expects PyTorch's ops: a FLOP counter counts `aten.mm`, and selective checkpointing saves its result. So an
    override leaves the call to PyTorch, which decomposes it into these ops.
    """
    return bool(count_modes()) and expects_pytorch_ops()


_library = torch.library.Library("shardwise", "FRAGMENT")


def new_op(signature: str, run: Callable[..., Tensor | tuple[Tensor, ...] | None]) -> OpOverload:
    """Define an op `shardwise::name(...)` that runs this function on local shards."""
    name = signature.partition("(")[0]
    _library.define(signature)
    _library.impl(name, run, "CompositeExplicitAutograd")
    op: OpOverload = getattr(torch.ops.shardwise, name).default
    return op


def call(op: OpOverload, *args: Any) -> Any:
    """Call an op below autograd, on distributed tensors. Active dispatch modes see the call.

    Without modes this calls `__torch_dispatch__` directly, which is quicker than PyTorch's dispatcher. The first
    argument may be plain: the gradient that a function of the user returned. Dispatch accepts or refuses it.
    """
    dispatch = type(args[0]).__torch_dispatch__
    if dispatch is _NOT_DISPATCHED:
        _require_distributed(op, args)
        return dispatch_to_subclass(op, args, {})
    return dispatch_to_subclass(op, args, {}) if count_modes() else dispatch(op, (), args)


_NOT_DISPATCHED = Tensor.__torch_dispatch__


def _require_distributed(op: OpOverload, args: Sequence[object]) -> None:
    """Raise an error if all tensors are plain: the gradient, and what a user's unpack hook made of saved tensors."""
    if not any(isinstance(tensor, DTensorBase) for tensor in tensors_in(args, {})):
        raise MixedTensorError(
            f"{op} computes the gradient of a function of distributed tensors, and all its tensors are plain",
            "return DTensors from the hook for saved tensors and from the function that made the gradient",
        )


def is_integer_view(target: Tensor) -> bool:
    """Return whether the target of a write is a view of integers or bools, which have no gradient."""
    return target._base is not None and not (target.dtype.is_floating_point or target.dtype.is_complex)


def filling_integers_without_gradient(func: OpOverload) -> Callable[..., object]:
    """Return the override of an op that converts values and writes them in place, as `fill_` does.

    If the values need a gradient, PyTorch gives the integers a gradient function, too, and then fails to regenerate
    views of them. So integer views are written without autograd.
    """

    def kernel(keys: Keys, target: Tensor, *args: object, **kwargs: object) -> object:
        if isinstance(target, DTensorBase) and is_integer_view(target):
            with torch.no_grad():
                return call_with_autograd(func, keys, target, *args, **kwargs)
        return call_with_autograd(func, keys, target, *args, **kwargs)

    return kernel


def where_distributed(func: OpOverload, run: Callable[..., object]) -> Callable[..., object]:
    """Return a kernel that calls `run(keys, *args, **kwargs)` if any tensor is distributed; the op itself otherwise.

    Plain tensors may be among them inside `implicit_replication`, or if they have one element: these count as numbers.
    """

    def kernel(keys: Keys, *args: object, **kwargs: object) -> object:
        tensors = tensors_in(args, kwargs)
        plain = [tensor for tensor in tensors if not isinstance(tensor, DTensorBase)]
        if len(plain) < len(tensors) and (
            not plain or modes.implicit_replication or all(tensor.numel() == 1 for tensor in plain)
        ):
            return run(keys, *args, **kwargs)
        return call_with_autograd(func, keys, *args, **kwargs)

    return kernel
