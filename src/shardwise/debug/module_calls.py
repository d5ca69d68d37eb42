"""Which module a moment of a program belongs to, in the forward and in the backward pass.

Calls of modules are followed while they run. A node of the autograd graph carries a number that counts up as nodes are
made, so the numbers made during a call tell, in the backward pass, which call a node comes from. Neither hooks on
tensors nor a second pass is needed, and the communication of a module's own hooks is the module's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

ROOT = "Global"
_next_number: Any = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]


@dataclass
class Call:
    """One call of a module: the graph nodes made in it have numbers from `start` on, up to `stop` without it."""

    module: str
    parent: Call | None
    start: int = 0
    again: bool = False  # made in a backward pass, to compute activations again
    stop: int | None = None
    inner: list[Call] = field(default_factory=list)

    def path(self) -> tuple[str, ...]:
        """The names of the modules that the call is in, outermost first, its own last."""
        return (*self.parent.path(), self.module) if self.parent else (self.module,)

    def at(self, number: int) -> Call:
        """The innermost call in which a graph node was made."""
        for call in reversed(self.inner):
            if call.start <= number and (call.stop is None or number < call.stop):
                return call.at(number)
        return self


@dataclass(frozen=True)
class Moment:
    """Where a program is: in which modules, in which pass, and whether it computes activations again."""

    modules: tuple[str, ...]
    backward: bool
    recomputing: bool


class ModuleCalls:
    """Follows the calls of modules inside `following`, and remembers the modules by name."""

    def __init__(self) -> None:
        self.everything = Call(ROOT, None)
        self.current = self.everything
        self.modules: dict[str, nn.Module] = {}  # those called and all in them
        self.called: set[str] = set()
        self._names: dict[nn.Module, str] = {}
        self._owners: dict[int, tuple[str, ...]] = {}

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follow all calls of modules inside the block."""
        call = nn.Module.__call__

        def followed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            before = self.current
            self.current = self._entered(module)
            try:
                return call(module, *args, **kwargs)
            finally:
                self.current.stop = _next_number()
                self.current = before

        nn.Module.__call__ = followed  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.__call__ = call  # type: ignore[method-assign]

    def _entered(self, module: nn.Module) -> Call:
        if module not in self._names:
            self._name(module)
        again = torch._C._current_graph_task_id() != -1
        call = Call(self._names[module], self.current, _next_number(), again)
        self.current.inner.append(call)
        self.called.add(call.module)
        for parameter in module.parameters(recurse=False):
            self._owners.setdefault(id(parameter), call.path())
        return call

    def _name(self, module: nn.Module) -> None:
        """Name a module that no called module contains by its class, and all modules in it by their path."""
        inside = self.current.module + "." if self.current is not self.everything else ""
        name = inside + type(module).__name__
        taken = sum(known == name or known.rpartition("_")[0] == name for known in self.modules)
        name = f"{name}_{taken}" if taken else name
        for path, part in module.named_modules():
            known = self._names.setdefault(part, f"{name}.{path}" if path else name)
            self.modules.setdefault(known, part)

    def now(self) -> Moment:
        """Where the program is at this moment."""
        if torch._C._current_graph_task_id() == -1:
            return Moment(self.current.path(), False, False)
        if self.current.again:
            return Moment(self.current.path(), True, True)
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return Moment((ROOT,), True, False)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) in self._owners:  # a parameter's gradient arrives
            return Moment(self._owners[id(variable)], True, False)
        return Moment(self.everything.at(node._sequence_nr()).path(), True, False)
