"""Run code that depends on the rank: once in a process, or once for each simulated rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor, no_grad

from ..sharding.layout import Coordinate
from ..sharding.mesh import MeshInfo
from ..world import current_world, map_ranks, shards_of

T = TypeVar("T")


def on_each_rank(fn: Callable[..., T], *tensors: object, mesh_info: MeshInfo | None = None) -> T:
    """Call `fn(rank, *local tensors)` for every simulated rank, or once, with None as rank, in a real process.

    Simulated ranks are numbered in the order of `mesh_info.ranks`; without tensors, `mesh_info` must be given.
    """
    if current_world() is not None:
        return map_ranks(fn, *tensors, ranks=None if mesh_info is None else len(mesh_info.ranks))
    with no_grad():
        return fn(None, *tensors)


def coordinate_of(mesh_info: MeshInfo, rank: int | None) -> Coordinate:
    """Return the coordinate of a rank in a mesh; for None, that of this process."""
    return mesh_info.coordinate if rank is None else mesh_info.coordinates[rank]


def allocate(buffer: Tensor) -> None:
    """Allocate the memory of a flat buffer again, uninitialized."""
    for tensor in shards_of(buffer):
        tensor.untyped_storage().resize_(tensor.numel() * tensor.itemsize)


def free(buffer: Tensor) -> None:
    """Free the memory of a flat buffer. Its views remain, and are valid again after `allocate`."""
    for tensor in shards_of(buffer):
        tensor.untyped_storage().resize_(0)


def is_allocated(buffer: Tensor) -> bool:
    """Return whether the memory of a flat buffer is allocated."""
    return all(t.untyped_storage().size() >= t.numel() * t.itemsize for t in shards_of(buffer))


def same_memory(one: Tensor, other: Tensor) -> bool:
    """Return whether two local tensors of one shape share the same memory."""
    pairs = zip(shards_of(one), shards_of(other), strict=True)
    return all(a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.dtype == b.dtype for a, b in pairs)
