"""Hooks on nodes of autograd: ours, and those that programs register on the same nodes after them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Set
from typing import Any

from torch.autograd import Function

Hook = Callable[..., object]
Hooks = OrderedDict[int, Hook]

_NO_HANDLE = -1
"""The id of a hook without a handle. PyTorch's ids count from 0."""


class HookRegistration:
    """Replaces the function by which PyTorch adds a hook to those of a node.

    A node calls its prehooks in the order in which they were registered. Those of programs would run after ours, as if
    they were part of what ours begin; so they are wrapped. Our own hooks are added without a handle to remove them,
    which takes longest to make. Relies on `Function._register_hook(hooks, hook)`, which gets the hooks of a node, None
    if it has none yet, and returns them and a handle.
    """

    def __init__(self, beginnings: Set[Hook], others: Set[Hook], wrap: Callable[[Hook], Hook]) -> None:
        self._beginnings, self._own, self._wrap = beginnings, beginnings | others, wrap
        self._original: Callable[[Hooks | None, Hook], tuple[Hooks, Any]] = Function._register_hook  # type: ignore[attr-defined]

    def install(self) -> None:
        """From now on, wrap prehooks that are registered on nodes that have one of `beginnings`."""
        Function._register_hook = staticmethod(self._register)  # type: ignore[attr-defined]

    def uninstall(self) -> None:
        """Let PyTorch add hooks by its own function again."""
        Function._register_hook = staticmethod(self._original)  # type: ignore[attr-defined]

    def _register(self, hooks: Hooks | None, hook: Hook) -> tuple[Hooks, Any]:
        if hooks is None:
            return (OrderedDict({_NO_HANDLE: hook}), None) if hook in self._own else self._original(None, hook)
        if hook not in self._own and not self._beginnings.isdisjoint(hooks.values()):
            hook = self._wrap(hook)
        return self._original(hooks, hook)
