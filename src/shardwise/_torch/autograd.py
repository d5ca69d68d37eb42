"""Autograd: functions that are applied quickly, and what the engine is doing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle


class Context(Protocol):
    """The `ctx` of an autograd function. A function that keeps more in it says so in a protocol of its own."""

    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor, ...]
    """What `save_for_backward` was given: in the place of a tensor that was None, None."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep these for the backward pass."""

    def set_materialize_grads(self, value: bool) -> None:
        """Whether the gradients of results that nobody used are zeros, and not None."""


class QuickFunction(torch.autograd.Function):
    """An autograd function that is applied without preparing for functorch where none of its transforms is active."""

    def __init_subclass__(cls) -> None:
        """Bind `apply` once for each class: looking it up in the base classes at each call takes as long as it does."""
        super().__init_subclass__()
        prepared, unprepared = super().apply, super(torch.autograd.Function, cls).apply  # type: ignore[misc]

        def apply(*args: object) -> Any:
            """As for any autograd function; arguments by position."""
            return prepared(*args) if _transforms_active() else unprepared(*args)

        cls.apply = staticmethod(apply)  # type: ignore[method-assign]


_transforms_active = torch._C._are_functorch_transforms_active


def accumulating_leaf() -> object:
    """In a hook of a leaf: the leaf whose `.grad` the gradient will be added to; None where a caller of
    `torch.autograd.grad` takes it instead."""
    node: Any = torch._C._current_autograd_node()
    try:
        return node.variable if torch._C._will_engine_execute_node(node) else None
    except RuntimeError:  # torch.autograd.grad takes the gradient before it reaches the leaf
        return None


def run_first(leaf: Tensor, handle: RemovableHandle) -> None:
    """Run this post-accumulate hook of a leaf before all others: autograd takes them in the order of their dict."""
    hooks = leaf._post_accumulate_grad_hooks
    for key in [key for key in hooks if key != handle.id]:
        hooks[key] = hooks.pop(key)


def in_backward() -> bool:
    """Whether a node of autograd runs on this thread, so that a call comes from a backward formula."""
    return torch._C._current_autograd_node() is not None


def call_after_backward(function: Callable[[], None]) -> None:
    """In a hook or formula of a backward pass: call this when all its gradients are computed, before it returns.

    Relies on `_execution_engine` keeping the function with the pass: if the pass fails, it is dropped, and not called.
    """
    torch.autograd.Variable._execution_engine.queue_callback(function)
