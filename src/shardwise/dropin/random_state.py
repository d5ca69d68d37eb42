"""Random state by the names of `torch.distributed.tensor._random`.

Random numbers of shardwise do not depend on sharding, so no tracker of offsets is needed. These names keep programs
working that test for a tracker, or seed through it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..sharding.spec import DTensorSpec

_rng_tracker = None


def is_rng_supported_mesh(device_mesh: DeviceMesh) -> bool:
    """Return True: on every mesh, random ops give the same numbers for any sharding."""
    return True


class _PhiloxState:
    """The seed and offset in the state of a CUDA generator: two 64-bit integers in a tensor of bytes."""

    def __init__(self, state: Tensor) -> None:
        self._state = state

    @property
    def state(self) -> Tensor:
        """The state, as `Generator.set_state` takes it."""
        return self._state

    @property
    def seed(self) -> Tensor:
        """The seed."""
        return self._state[:8].view(torch.uint64)

    @seed.setter
    def seed(self, seed: Tensor) -> None:
        self._state[:8] = seed.view(torch.uint8)

    @property
    def offset(self) -> int:
        """The offset of the generator."""
        return int(self._state[8:].view(torch.int64).item())

    @offset.setter
    def offset(self, offset: int) -> None:
        self._state[8:] = torch.tensor([offset], dtype=torch.int64).view(torch.uint8)


class OffsetBasedRNGTracker:
    """A tracker without state: random numbers depend on the generator of the device alone."""

    def __init__(self, device_mesh: DeviceMesh, run_state_sync: bool = True) -> None:
        self.device_mesh = device_mesh
        self.distribute_region_enabled = True

    @contextmanager
    def _distribute_region(self, spec: DTensorSpec, generator: torch.Generator | None = None) -> Iterator[None]:
        yield
