"""Run a module on local tensors: during its forward, its distributed parameters are replaced by local ones.

Between a column-wise and a row-wise module, activations are local shards, e.g. other heads on every rank. A norm of
heads, or a parameter with an element for each head, must then be local as well. The parameter of the model stays
distributed: `to_local` sets the placements of local gradients, so that those of a replicated one are summed over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from .._torch.modules import parameters_of
from ..tensor.dtensor import DTensor

ToLocal = Callable[[DTensor], Tensor]


class LocalParameters:
    """Replaces parameters of a module, by their paths in it, while its forward runs."""

    def __init__(self, to_local: Mapping[str, ToLocal]) -> None:
        self._to_local = dict(to_local)
        self._running: list[tuple[nn.Module, dict[str, nn.Parameter]]] = []

    def register(self, module: nn.Module) -> None:
        """Replace the parameters before each forward of the module, and put them back after it, errors included."""
        module.register_forward_pre_hook(lambda module, _: self.enter(module))
        module.register_forward_hook(lambda module, *_: self.leave(module), always_call=True)

    def enter(self, module: nn.Module) -> None:
        """Replace the parameters by local tensors."""
        replaced: dict[str, nn.Parameter] = {}
        self._running.append((module, replaced))
        for path, to_local in self._to_local.items():
            owner, name = owner_of(module, path)
            parameter = parameters_of(owner)[name]
            if isinstance(parameter, DTensor):
                replaced[path] = parameter
                parameters_of(owner)[name] = to_local(parameter)

    def leave(self, module: nn.Module) -> None:
        """Put back the parameters that the last call of `enter` for this module replaced, if any."""
        for index in reversed(range(len(self._running))):
            if self._running[index][0] is module:
                for path, parameter in self._running.pop(index)[1].items():
                    owner, name = owner_of(module, path)
                    parameters_of(owner)[name] = parameter
                return


def owner_of(module: nn.Module, path: str) -> tuple[nn.Module, str]:
    """Return the submodule that owns the parameter at this path, and the parameter's name in it."""
    below, _, name = path.rpartition(".")
    return module.get_submodule(below), name
