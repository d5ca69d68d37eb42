"""A side: an implementation of distributed tensors that a trial runs on.

A side makes distributed tensors from global values, and returns the global values of results. `Simulated` has all
ranks in this process; `Processes` is one of several processes. Another implementation is measured by a side of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ...sharding.placement import Placement
from ...tensor.dtensor import DTensor
from ...world import RankTensor, common, simulate
from ..values import assemble, check_strides, make_dtensor


class Side(Protocol):
    """An implementation of distributed tensors in a world of four ranks."""

    def meshes(self, sizes: Sequence[tuple[int, ...]]) -> AbstractContextManager[list[DeviceMesh]]:
        """Return a context with meshes of these sizes."""

    def make(self, value: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], seed: int) -> Tensor:
        """Return the distributed tensor with this value."""

    def global_value(self, found: object) -> Tensor:
        """Return the global value of a result; raises if ranks do not agree on it."""

    def settle(self, failed: bool) -> bool:
        """Return whether all ranks agree that a trial failed, or that it did not. If not, the trials end."""


class Agreeing(Protocol):
    """Ranks that exchange whether a trial failed."""

    def agree(self, failed: bool) -> bool:
        """Return whether all ranks pass the same value."""


class Processes:
    """The side of one process of several."""

    def __init__(self, ranks: Agreeing | None = None) -> None:
        self.ranks = ranks

    @contextmanager
    def meshes(self, sizes: Sequence[tuple[int, ...]]) -> Iterator[list[DeviceMesh]]:
        """Yield meshes of all processes."""
        yield [init_device_mesh("cpu", size) for size in sizes]

    def make(self, value: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], seed: int) -> Tensor:
        """Return the distributed tensor with this value."""
        return make_dtensor(value, mesh, placements, seed=seed)

    def global_value(self, found: object) -> Tensor:
        """Return the global value of a result."""
        if not isinstance(found, DTensor):
            raise TypeError(f"the result is a {type(found).__name__}, not a DTensor")
        with torch.no_grad():
            value = found.full_tensor()
        check_strides(found._local_shard, found._spec, dist.get_rank())
        return value

    def settle(self, failed: bool) -> bool:
        """Return whether all ranks agree that a trial failed, or that it did not."""
        return self.ranks is None or self.ranks.agree(failed)


class Simulated(Processes):
    """The side with all ranks in this process."""

    @contextmanager
    def meshes(self, sizes: Sequence[tuple[int, ...]]) -> Iterator[list[DeviceMesh]]:
        """Yield meshes in a simulated world."""
        with simulate(4):
            yield [init_device_mesh("cpu", size) for size in sizes]

    def global_value(self, found: object) -> Tensor:
        """Return the global value of a result, assembled from the shards of all ranks."""
        if isinstance(found, DTensor):
            return assemble(found)
        if isinstance(found, RankTensor):
            return common(found.detach())
        raise TypeError(f"the result is a {type(found).__name__}, not a DTensor")
