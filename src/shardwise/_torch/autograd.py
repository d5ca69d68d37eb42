"""Autograd: functions with a fast `apply`, hooks of leaves, and callbacks of a backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import FunctionMeta
from torch.utils.hooks import RemovableHandle


class Context(Protocol):
    """The `ctx` of an autograd function. Functions that set more attributes declare them in subclasses."""

    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor, ...]
    """The arguments of `save_for_backward`, which may be None."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Save these for the backward pass."""

    def set_materialize_grads(self, value: bool) -> None:
        """Set whether the gradients of unused results are zeros instead of None."""


class _BackwardCalledDirectly(FunctionMeta):
    """The metaclass of `QuickFunction`: makes `backward` of a function the method that the engine calls on its nodes.

    Relies on `_backward_cls`, the class of the nodes, whose method `apply` would look up `backward` at each call.
    """

    def __init__(cls, name: str, bases: tuple[type, ...], attributes: dict[str, object]) -> None:
        super().__init__(name, bases, attributes)
        cls._bind_backward()

    def __setattr__(cls, name: str, value: object) -> None:
        """Set an attribute of the function. A tool that replaces `backward` replaces the nodes' method, too."""
        super().__setattr__(name, value)
        if name == "backward":
            cls._bind_backward()

    def _bind_backward(cls) -> None:
        function: Any = cls
        function._backward_cls.apply = function.backward


class QuickFunction(torch.autograd.Function, metaclass=_BackwardCalledDirectly):
    """An autograd function whose `apply` skips the preparation for functorch where none of its transforms is active.

    Its derivative is a static method `backward`.
    """

    def __init_subclass__(cls) -> None:
        """Bind `apply` once for each class: a look-up in the base classes at each call takes as long as the call."""
        super().__init_subclass__()
        prepared, unprepared = super().apply, super(torch.autograd.Function, cls).apply  # type: ignore[misc]

        def apply(*args: object) -> Any:
            """Apply the function, as for any autograd function. Arguments are positional."""
            return prepared(*args) if _transforms_active() else unprepared(*args)

        cls.apply = staticmethod(apply)  # type: ignore[method-assign]


_transforms_active = torch._C._are_functorch_transforms_active


def accumulating_leaf() -> object:
    """Return, in a hook of a leaf, the leaf to whose `.grad` the gradient will be added.

    Return None if `torch.autograd.grad` returns the gradient instead.
    """
    node: Any = torch._C._current_autograd_node()
    try:
        return node.variable if torch._C._will_engine_execute_node(node) else None
    except RuntimeError:  # torch.autograd.grad captures the gradient before it reaches the leaf
        return None


def run_first(leaf: Tensor, handle: RemovableHandle) -> None:
    """Run this post-accumulate hook of a leaf before all others: autograd runs them in the order of their dict."""
    hooks = leaf._post_accumulate_grad_hooks
    for key in [key for key in hooks if key != handle.id]:
        hooks[key] = hooks.pop(key)


def in_backward() -> bool:
    """Return whether a node of autograd runs in this thread, so that the caller is part of a formula or hook."""
    return torch._C._current_autograd_node() is not None


def call_after_backward(function: Callable[[], None]) -> None:
    """Call a function when the backward pass that runs now has computed all gradients, before it returns.

    For hooks and formulas. Relies on `_execution_engine`, which drops the function if the pass fails.
    """
    torch.autograd.Variable._execution_engine.queue_callback(function)
