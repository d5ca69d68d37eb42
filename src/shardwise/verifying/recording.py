"""The tensors that a run computes, in order: outputs of modules, their gradients, the loss, parameters, buffers.

Outputs are recorded after all hooks of a module, those of parallel styles included.
Gradients of parameters are recorded when the optimizer is about to use them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from .._torch.autograd_graph import in_backward_pass
from .._torch.clipping import watching_clipping
from .._torch.pytree import tree_leaves
from ..nn.module_calls import around_module_calls
from ..sharding.source_lines import Line, users_line

Kind = Literal[
    "initial",
    "input",
    "output",
    "loss",
    "value",
    "output gradient",
    "gradient",
    "norm",
    "clipped gradient",
    "parameter",
    "buffer",
]

# Wrappers put these into the paths of the modules inside.
_WRAPPERS = ("module", "_orig_mod", "_checkpoint_wrapped_module")


class Key(NamedTuple):
    """Identifies a tensor of a run: in two runs the same key means the same tensor."""

    step: int
    kind: Kind
    path: str
    call: int = 0
    item: int = 0


@dataclass(frozen=True)
class Seen:
    """A copy of a tensor, and the user's line that computed it."""

    value: Tensor
    line: Line


class Recording:
    """The tensors of one run, in the order in which they were computed."""

    def __init__(self) -> None:
        self.seen: dict[Key, Seen] = {}
        self.tied: list[set[str]] = []
        """The sets of names that belong to one tied parameter."""
        self.names: set[str] = set()
        """Names of all parameters and buffers."""
        self.lines: dict[str, Line] = {}
        """The line that first called each module."""
        self.error: Exception | None = None
        self.dtypes: set[torch.dtype] = set()


class Recorder:
    """Records the tensors of a model while its program runs."""

    def __init__(self, model: nn.Module, *, all_inputs: bool) -> None:
        self.model = model
        self.all_inputs = all_inputs
        """Whether to record inputs that are the output of another module, too."""
        self.made = Recording()
        self.step = 0
        self._paths = {module: plain_path(path) for path, module in model.named_modules()}
        self._calls: Counter[str] = Counter()
        self._order: dict[str, int] = {}
        self._clipped = False
        self._known: dict[int, tuple[Tensor, int]] = {}
        """Outputs of modules in this step, with their versions when recorded. Holding them keeps their ids valid."""
        self.made.tied = _tied(model)
        self.made.names = {name for name, _ in self._state()}

    # ---- while the program runs -----------------------------------------------------------------------------------

    @contextmanager
    def recording(self, optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
        """Record calls of modules, clipping, and what `optimizer` is about to use."""
        hook = optimizer.register_step_pre_hook(lambda *_: self.gradients()) if optimizer is not None else None
        try:
            with around_module_calls(self._called), watching_clipping(self._clip):
                yield
        finally:
            if hook is not None:
                hook.remove()

    def _called(self, call: Callable[..., object], module: nn.Module, *args: object, **kwargs: object) -> object:
        path = self._paths.get(module)
        if path is None or in_backward_pass():  # a call in a backward pass recomputes activations
            return call(module, *args, **kwargs)
        line = users_line()
        self._inputs(path, (args, kwargs), line)
        output = call(module, *args, **kwargs)
        self._outputs(path, output, line)
        return output

    def begin(self, step: int) -> None:
        """Start a step."""
        self.step, self._clipped = step, False
        self._calls.clear()
        self._known.clear()

    def add(
        self, kind: Kind, path: str, value: object, *, line: Line | None = None, call: int = 0, item: int = 0
    ) -> None:
        """Record a tensor."""
        if isinstance(value, (int, float)):
            value = torch.tensor(float(value), dtype=torch.float64)
        if isinstance(value, Tensor):
            with torch.no_grad():
                copy = value.detach().clone()
            self.made.seen[Key(self.step, kind, path, call, item)] = Seen(copy, line or users_line())

    def _inputs(self, path: str, inputs: object, line: Line) -> None:
        for item, tensor in enumerate(_tensors(inputs)):
            if self.all_inputs or self._known.get(id(tensor), (None, -1))[1] != tensor._version:
                self.add("input", path, tensor, line=line, call=self._calls[path], item=item)

    def _outputs(self, path: str, output: object, line: Line) -> None:
        call = self._calls[path]
        self._calls[path] += 1
        self._order.setdefault(path, len(self._order))
        self.made.lines.setdefault(path, line)
        for item, tensor in enumerate(_tensors(output)):
            self.add("output", path, tensor, line=line, call=call, item=item)
            self._known[id(tensor)] = (tensor, tensor._version)
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(self._gradient_hook(path, call, item, line))

    def _gradient_hook(self, path: str, call: int, item: int, line: Line):  # type: ignore[no-untyped-def]
        def arrived(gradient: Tensor) -> None:
            self.add("output gradient", path, gradient, line=line, call=call, item=item)

        return arrived

    def _clip(self, norm: Tensor) -> None:
        if not self._clipped:
            self._record_gradients("gradient")
        self._clipped = True
        self.add("norm", "grad_norm", norm)

    def gradients(self) -> None:
        """Record the gradients that the optimizer is about to use."""
        self._record_gradients("clipped gradient" if self._clipped else "gradient")

    def _record_gradients(self, kind: Kind) -> None:
        found = [(plain_path(name), parameter) for name, parameter in self.model.named_parameters()]
        # In the order of the backward pass: what was used last comes first.
        found.sort(key=lambda pair: -self._order.get(pair[0].rpartition(".")[0], -1))
        for name, parameter in found:
            self.add(kind, name, parameter.grad, line=self._line_of(name))

    def state(self, kind: Literal["initial", "step"]) -> None:
        """Record all parameters and buffers."""
        for name, tensor in self._state():
            is_parameter = isinstance(tensor, nn.Parameter)
            self.add(
                "initial" if kind == "initial" else "parameter" if is_parameter else "buffer",
                name,
                tensor,
                line=self._line_of(name),
            )

    def _state(self) -> list[tuple[str, Tensor]]:
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        return [(plain_path(name), tensor) for name, tensor in named]

    def _line_of(self, name: str) -> Line | None:
        return self.made.lines.get(name.rpartition(".")[0])


def plain_path(path: str) -> str:
    """Return the path of a module or parameter without the names that wrappers add."""
    return ".".join(part for part in path.split(".") if part not in _WRAPPERS)


def _tensors(output: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


def _tied(model: nn.Module) -> list[set[str]]:
    names: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(plain_path(name))
    return [group for group in names.values() if len(group) > 1]
