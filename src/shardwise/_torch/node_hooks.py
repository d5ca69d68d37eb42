"""Hooks on nodes of autograd: ours, and those that programs register on the same nodes after them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Set
from typing import Any

from torch.autograd import Function

Hook = Callable[..., object]
Hooks = OrderedDict[int, Hook]
Register = Callable[[Hooks | None, Hook], tuple[Hooks, Any]]

_NO_HANDLE = -1
"""The id of a hook without a handle. PyTorch's ids count from 0."""


class HookRegistration:
    """Replaces the function with which PyTorch adds a hook to a node.

    Our prehooks `beginnings` mark the beginning of something, such as a derivative formula. A node calls its prehooks
    in the order in which they were registered, so prehooks of programs that run after ours would count as part of it:
    they are wrapped by `wrap`. Our own hooks are added without a handle to remove them, which would take most of the
    time. `before` is called before a hook of a program is added, and returns whether it has added hooks of ours. Relies
    on `Function._register_hook(hooks, hook)`, which gets the hooks of a node, None if it has none yet, and returns them
    and a handle.
    """

    def __init__(
        self, beginnings: Set[Hook], others: Set[Hook], wrap: Callable[[Hook], Hook], before: Callable[[], bool]
    ) -> None:
        original: Register = Function._register_hook
        own = beginnings | others

        def register(hooks: Hooks | None, hook: Hook) -> tuple[Hooks, Any]:
            if hook in own:
                if hooks is None:
                    hooks = OrderedDict()
                    hooks[_NO_HANDLE] = hook
                    return hooks, None
            elif before() or (hooks is not None and not beginnings.isdisjoint(hooks.values())):
                hook = wrap(hook)
            return original(hooks, hook)

        self._original, self._register = original, register

    def install(self) -> None:
        """Wrap prehooks that are registered, from now on, on nodes that have one of `beginnings`."""
        Function._register_hook = staticmethod(self._register)  # type: ignore[method-assign]

    def uninstall(self) -> None:
        """Let PyTorch add hooks by its own function again."""
        Function._register_hook = staticmethod(self._original)  # type: ignore[method-assign]
