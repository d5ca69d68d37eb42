"""Track which module a program is in, in the forward and in the backward pass.

Calls of modules are tracked while they run. Autograd numbers its nodes as they are made, so the range of numbers made
during a call shows, in the backward pass, which call a node comes from. This needs neither hooks on tensors nor a
second pass, and the communication of a module's own hooks counts as the module's.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from .._torch.autograd_graph import accumulated_leaf, in_backward_pass, next_node_number, node_number
from .._torch.backward_pass import current_node
from ..nn.module_calls import around_module_calls

ROOT = "Global"


@dataclass
class Call:
    """One call of a module. Autograd nodes made in it have numbers in `[start, stop)`; `stop` is None while it runs."""

    module: str
    parent: Call | None
    start: int = 0
    recomputing: bool = False
    """Whether the call is made in a backward pass, to recompute activations."""
    stop: int | None = None
    inner: list[Call] = field(default_factory=list)

    def path(self) -> tuple[str, ...]:
        """Return the names of the modules that the call is in, outermost first and its own last."""
        return (*self.parent.path(), self.module) if self.parent else (self.module,)

    def at(self, number: int) -> Call:
        """Return the innermost call in which the autograd node of this number was made."""
        for call in reversed(self.inner):
            if call.start <= number and (call.stop is None or number < call.stop):
                return call.at(number)
        return self


@dataclass(frozen=True)
class Moment:
    """A position in a program: the modules it is in, the pass, and whether it recomputes activations."""

    modules: tuple[str, ...]
    backward: bool
    recomputing: bool


class ModuleCalls:
    """Tracks the calls of modules inside `track`, and the modules by name."""

    def __init__(self) -> None:
        self.root = Call(ROOT, None)
        self.current = self.root
        self.modules: dict[str, nn.Module] = {}
        """All modules that were called, and their submodules."""
        self.called: set[str] = set()
        self._names: dict[nn.Module, str] = {}
        self._owners: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        """For each parameter, the modules that it is in."""
        self._parameters: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        """For each parameter, its name."""

    def track(self) -> AbstractContextManager[None]:
        """Track all calls of modules inside the block, in this thread and in its backward passes."""
        return around_module_calls(self._tracked)

    def _tracked(self, call: Callable[..., object], module: nn.Module, *args: object, **kwargs: object) -> object:
        before = self.current
        self.current = self._enter(module)
        try:
            return call(module, *args, **kwargs)
        finally:
            self.current.stop = next_node_number()
            self.current = before

    def _enter(self, module: nn.Module) -> Call:
        if module not in self._names:
            self._name(module)
        call = Call(self._names[module], self.current, next_node_number(), in_backward_pass())
        self.current.inner.append(call)
        self.called.add(call.module)
        for name, parameter in module.named_parameters(recurse=False):
            self._owners.setdefault(parameter, call.path())
            self._parameters.setdefault(parameter, f"{call.module}.{name}")
        return call

    def _name(self, module: nn.Module) -> None:
        """Name a module that is part of no called module by its class, and its submodules by their paths."""
        prefix = self.current.module + "." if self.current is not self.root else ""
        name = prefix + type(module).__name__
        taken = sum(known == name or known.rpartition("_")[0] == name for known in self.modules)
        name = f"{name}_{taken}" if taken else name
        for path, submodule in module.named_modules():
            known = self._names.setdefault(submodule, f"{name}.{path}" if path else name)
            self.modules.setdefault(known, submodule)
            for own, parameter in submodule.named_parameters(recurse=False):  # before hooks replace them
                self._parameters.setdefault(parameter, f"{known}.{own}")

    def parameter_name(self, tensor: Tensor) -> str | None:
        """Return the name of a parameter of a called module, with the path of the module; None for other tensors."""
        return self._parameters.get(tensor)

    def owners(self, leaf: Tensor) -> tuple[str, ...]:
        """Return the modules that a parameter is in, outermost first."""
        module = self._parameters.get(leaf, "").rpartition(".")[0]
        return self._owners.get(leaf, (ROOT, module) if module else (ROOT,))

    def now(self) -> Moment:
        """Return the current position in the program."""
        if not in_backward_pass():
            return Moment(self.current.path(), False, False)
        if self.current.recomputing:
            return Moment(self.current.path(), True, True)
        node = current_node()
        if node is None:
            return Moment((ROOT,), True, False)
        leaf = accumulated_leaf(node)
        if leaf is not None and leaf in self._owners:  # the gradient of a parameter belongs to its module
            return Moment(self._owners[leaf], True, False)
        return Moment(self.root.at(node_number(node)).path(), True, False)
