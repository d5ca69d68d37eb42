"""The base class of parallel styles."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import Self

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..errors import InputError
from .axis import DEFAULT_AXIS


class ParallelStyle(ABC):
    """How one module is parallelized. Subclasses implement `_apply`, which `parallelize_module` calls.

    A style acts on one mesh axis: the only one of its mesh, or the one named "tp". `style.over("model")` is the same
    style for another axis.

    The styles of this package have the methods of PyTorch's styles that subclasses override, such as
    `_prepare_input_fn`. A method that a subclass overrides is called as PyTorch calls it. Otherwise a faster hook runs
    in its place, which is prepared once, when the style is applied.

    >>> class Replicated(ParallelStyle):
    ...     def _apply(self, module, device_mesh):
    ...         return shardwise.distribute_module(module, device_mesh)
    >>> parallelize_module(model, mesh["tp"], {"0": Replicated()})[0].weight.placements
    (Replicate(),)
    """

    src_data_rank: int | None = 0
    axis: str | None = None

    @abstractmethod
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Distribute the module's parameters, register hooks on it, and return it."""

    def over(self, axis: str) -> Self:
        """Return the same style for the mesh axis of this name."""
        style = copy.copy(self)
        style.axis = axis
        return style

    def _overrides(self, owner: type[ParallelStyle], *names: str) -> bool:
        """Return whether any of these methods is overridden: not the one that `owner` defines."""
        return any(_function(getattr(self, name)) is not _function(getattr(owner, name)) for name in names)

    def _calls(self, owner: type[ParallelStyle], name: str, mesh: DeviceMesh) -> bool:
        """Return whether this static method is overridden and must be called.

        Raise an error if the style is neither for the axis "tp" nor for the only one: the method does not get the axis.
        """
        if not self._overrides(owner, name):
            return False
        if self.axis not in (None, DEFAULT_AXIS) and mesh.ndim > 1:
            raise InputError(
                f"{type(self).__name__} overrides {name} and is applied over {self.axis!r} of a mesh of {mesh.ndim} "
                "axes: the method does not get the axis",
                f"pass the axis as a mesh: parallelize_module(module, mesh[{self.axis!r}], plan)",
            )
        return True

    def __repr__(self) -> str:
        options = {n: v for n, v in vars(self).items() if v not in (None, {}) and n != "src_data_rank"}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in options.items())})"


def _function(method: object) -> object:
    return getattr(method, "__func__", method)
