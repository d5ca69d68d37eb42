"""Who holds the distributed tensors of a trial.

A side makes tensors of known values and gives their values back. `Simulated` holds all ranks in this process and looks
at each rank's part; `Processes` is one of several processes. Another implementation can be measured by giving it a
side of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ...sharding.placement import Placement
from ...tensor.dtensor import DTensor
from ...world import RankTensor, common, simulate
from ..values import assemble, make_dtensor


class Side(Protocol):
    """An implementation of distributed tensors in a world of four ranks."""

    def meshes(self, sizes: Sequence[tuple[int, ...]]) -> Any:
        """A context with meshes of these sizes."""

    def make(self, value: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], seed: int) -> Tensor:
        """The distributed tensor of this value."""

    def whole(self, found: Any) -> Tensor:
        """The value of a result, after a look whether all ranks agree on it."""

    def settle(self, failed: bool) -> bool:
        """Whether all ranks agree that a trial failed, or not; if they do not, no more trials are made."""


class Agreeing(Protocol):
    """Ranks that tell each other how a trial went."""

    def agree(self, failed: bool) -> bool:
        """Whether all ranks say the same."""


class Processes:
    """This process is one of several, which agree on how trials went."""

    def __init__(self, ranks: Agreeing | None = None) -> None:
        self.ranks = ranks

    @contextmanager
    def meshes(self, sizes: Sequence[tuple[int, ...]]) -> Iterator[list[DeviceMesh]]:
        """Meshes of all processes."""
        yield [init_device_mesh("cpu", size) for size in sizes]

    def make(self, value: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], seed: int) -> Tensor:
        """The distributed tensor of this value."""
        return make_dtensor(value, mesh, placements, seed=seed)

    def whole(self, found: Any) -> Tensor:
        """The value of a result."""
        if not isinstance(found, DTensor):
            raise TypeError(f"the result is a {type(found).__name__}, not a DTensor")
        with torch.no_grad():
            return found.full_tensor()

    def settle(self, failed: bool) -> bool:
        """Whether all ranks agree that a trial failed, or not."""
        return self.ranks is None or self.ranks.agree(failed)


class Simulated(Processes):
    """All ranks are in this process."""

    @contextmanager
    def meshes(self, sizes: Sequence[tuple[int, ...]]) -> Iterator[list[DeviceMesh]]:
        """Meshes in a simulated world."""
        with simulate(4):
            yield [init_device_mesh("cpu", size) for size in sizes]

    def whole(self, found: Any) -> Tensor:
        """The value of a result, put together from the parts of all ranks."""
        if isinstance(found, DTensor):
            return assemble(found)
        if isinstance(found, RankTensor):
            return common(found.detach())
        raise TypeError(f"the result is a {type(found).__name__}, not a DTensor")
