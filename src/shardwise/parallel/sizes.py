"""Infer the global size of a sharded dim from a local shard, without asking the other ranks on every call.

A rank sees its own shard only, so `DTensor.from_local` without a shape asks the other ranks: a collective, and a wait
for its result. But most local tensors that enter a module are the local output of another one, whose global size is
known. So the global sizes of local outputs are recorded, the same on all ranks, and an input whose local size matches
exactly one of them is taken for a shard of that size.

A module asks the other ranks on its first call. If the answer is the size recorded last, its inputs are taken to be
outputs of other modules from then on, and a shard that matches no recorded size is an error on that rank. Otherwise its
inputs come from elsewhere, and it asks on every call. The simulated world has all shards at hand and never asks.
"""

from __future__ import annotations

from torch import Tensor

from ..errors import ShapeError
from ..sharding.layout import chunk_range
from ..sharding.mesh import MeshInfo
from ..sharding.placement import Shard
from ..sharding.runtime import WorldState
from ..sharding.spec import DTensorSpec
from ..tensor.dtensor import DTensor

_RECENT = 10_000
"""A size is forgotten after so many later outputs. Otherwise one odd batch would make all later calls ambiguous."""

Key = tuple[MeshInfo, int, int]
"""A mesh of one axis, the number of dims of the tensor, and its sharded dim."""


class OutputSizes:
    """The global sizes of local outputs in one world, each with the number of the output that had it last."""

    def __init__(self) -> None:
        self._count = 0
        self._last: dict[Key, dict[int, int]] = {}

    def add(self, key: Key, size: int) -> None:
        """Record that an output of this size was returned as local shards."""
        self._count += 1
        sizes = self._last.setdefault(key, {})
        sizes[size] = self._count
        if len(sizes) > 2 * _RECENT:
            self._last[key] = {size: sizes[size] for size in self.recent(key)}

    def recent(self, key: Key) -> list[int]:
        """Return the sizes that were recorded in the recent past."""
        return [size for size, number in self._last.get(key, {}).items() if number > self._count - _RECENT]

    def latest(self, key: Key) -> int | None:
        """Return the size that was recorded last."""
        sizes = self._last.get(key)
        return max(sizes, key=sizes.__getitem__) if sizes else None


_OUTPUT_SIZES = WorldState(OutputSizes)


def record_output_size(spec: DTensorSpec) -> None:
    """Record the global size of a tensor on a mesh of one axis that is about to be returned as local shards."""
    (placement,) = spec.placements
    if type(placement) is Shard and not spec.mesh_info.simulated:
        key = spec.mesh_info, spec.ndim, placement.dim
        _OUTPUT_SIZES.of(spec.mesh_info.runtime).add(key, spec.shape[placement.dim])


class GlobalSizes:
    """Infers the global shapes of the local tensors that one module gets as input."""

    def __init__(self, mesh_info: MeshInfo, placement: Shard) -> None:
        self.mesh_info, self.placement = mesh_info, placement
        self.outputs = _OUTPUT_SIZES.of(mesh_info.runtime)
        self.gets_outputs: bool | None = None
        """Whether the inputs are local outputs of other modules; None before the first call."""

    def global_shape(self, local: Tensor) -> tuple[int, ...] | None:
        """Return the global shape of a local tensor; None if the ranks must ask each other."""
        if self.mesh_info.simulated or not self.gets_outputs:
            return None
        dim = self.placement.dim % local.dim()
        sizes, local_size = self.outputs.recent((self.mesh_info, local.dim(), dim)), local.shape[dim]
        (ranks,), (rank,) = self.mesh_info.sizes, self.mesh_info.coordinate
        matching = [size for size in sizes if _local_size(size, ranks, rank) == local_size]
        if not matching:
            raise ShapeError(
                f"cannot infer the global size of dim {dim}: the local size is {local_size}, and no tensor sharded "
                f"over {self.mesh_info!r} has such a shard on this rank (their sizes: {sorted(sizes)})",
                "pass a DTensor: DTensor.from_local(local, mesh, placements)",
            )
        if any(_ambiguous(matching[0], other, ranks) for other in sizes):
            return None
        return (*local.shape[:dim], matching[0], *local.shape[dim + 1 :])

    def observe(self, tensor: DTensor) -> None:
        """Note after the first call whether the input was the local output of another module."""
        if self.gets_outputs is None and not self.mesh_info.simulated:
            dim = self.placement.dim % tensor.dim()
            self.gets_outputs = tensor.shape[dim] == self.outputs.latest((self.mesh_info, tensor.dim(), dim))


def _local_size(size: int, ranks: int, rank: int) -> int:
    start, stop = chunk_range(0, size, ranks, rank)
    return stop - start


def _ambiguous(size: int, other: int, ranks: int) -> bool:
    """Return whether some rank has equal shards of both sizes. All ranks compute the same answer."""
    if size == other:
        return False
    # Shards are full up to some rank, then one may be smaller, and the rest are empty. So between these ranks
    # neither size has a different shard.
    full = [s // max(_local_size(s, ranks, 0), 1) for s in (size, other)]
    changes = {0, *full, *(rank + 1 for rank in full)}
    return any(_local_size(size, ranks, r) == _local_size(other, ranks, r) for r in changes if r < ranks)
