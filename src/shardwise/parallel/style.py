"""What a parallel style is: a way to distribute one module, and to treat what goes in and comes out."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import Self

from torch import nn
from torch.distributed.device_mesh import DeviceMesh


class ParallelStyle(ABC):
    """How one module is parallelized. Subclasses say it in `_apply`, which `parallelize_module` calls.

    A style speaks of one mesh axis: the only one of its mesh, or the one named "tp". `style.over("model")` is the same
    style for another axis.
    """

    src_data_rank: int | None = 0
    axis: str | None = None

    @abstractmethod
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Distribute the module's parameters, hang the hooks, and return it."""

    def over(self, axis: str) -> Self:
        """The same style for the axis of this name."""
        style = copy.copy(self)
        style.axis = axis
        return style
