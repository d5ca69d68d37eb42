"""The base class of parallel styles."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import Self

from torch import nn
from torch.distributed.device_mesh import DeviceMesh


class ParallelStyle(ABC):
    """How one module is parallelized. Subclasses implement `_apply`, which `parallelize_module` calls.

    A style acts on one mesh axis: the only one of its mesh, or the one named "tp". `style.over("model")` is the same
    style for another axis.
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

    def __repr__(self) -> str:
        options = {n: v for n, v in vars(self).items() if v not in (None, {}) and n != "src_data_rank"}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in options.items())})"
