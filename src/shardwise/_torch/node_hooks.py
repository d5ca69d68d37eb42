"""Hooks of programs on nodes of autograd that have hooks of ours, too, and on the tensors that nodes save."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Set
from typing import Any, NamedTuple

from torch import fx
from torch._C._autograd import SavedTensor
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

Hook = Callable[..., object]
Hooks = OrderedDict[int, Hook]
Register = Callable[[Hooks | None, Hook], tuple[Hooks, Any]]

_SavedTensor: Any = SavedTensor

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


class _Hooks(NamedTuple):
    """What a block of `saved_tensors_hooks` reads of itself when it begins."""

    pack_hook: Hook
    unpack_hook: Hook


class UnpackHookWrapping:
    """Replaces the functions that add hooks for saved tensors: unpack hooks are wrapped by `wrap`.

    The hook runs when a derivative formula reads the saved tensor, so it would count as part of the formula. Hooks that
    are FX graphs are not wrapped: compilers look for these, and inline them. Relies on `__enter__` of a block of
    `saved_tensors_hooks` reading no more of it than its hooks, and on `SavedTensor`, whose method adds hooks for one.
    """

    def __init__(self, wrap: Callable[[Hook], Hook]) -> None:
        original: Any = saved_tensors_hooks.__enter__

        @functools.wraps(original)
        def enter(block: saved_tensors_hooks) -> None:
            unpack = block.unpack_hook
            original(_Hooks(block.pack_hook, unpack if isinstance(unpack, fx.GraphModule) else wrap(unpack)))

        original_register: Any = _SavedTensor.register_hooks

        @functools.wraps(original_register)
        def register(saved: object, pack: Hook, unpack: Hook) -> None:
            original_register(saved, pack, wrap(unpack))

        self._originals, self._wrapping = (original, original_register), (enter, register)

    def install(self) -> None:
        """Wrap unpack hooks, from now on: of blocks that begin, and of single tensors."""
        saved_tensors_hooks.__enter__, _SavedTensor.register_hooks = self._wrapping  # type: ignore[method-assign]

    def uninstall(self) -> None:
        """Let PyTorch use hooks unwrapped again."""
        saved_tensors_hooks.__enter__, _SavedTensor.register_hooks = self._originals  # type: ignore[method-assign]
