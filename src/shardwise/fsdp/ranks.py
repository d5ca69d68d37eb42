"""Code that depends on the rank: a process runs it once, for itself, a simulated world once for each rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor, no_grad

from ..sharding.layout import Coordinate
from ..sharding.mesh import MeshInfo
from ..world import RankTensor, current_world, map_ranks

T = TypeVar("T")


def on_each_rank(fn: Callable[..., T], *tensors: object, mesh_info: MeshInfo | None = None) -> T:
    """Call `fn(rank, *local tensors)` on every rank that this process holds; `rank` is None if that is its own.

    Without tensors, `mesh_info` says how many ranks there are. They are counted in the order of `mesh_info.ranks`.
    """
    if current_world() is not None:
        return map_ranks(fn, *tensors, ranks=None if mesh_info is None else len(mesh_info.ranks))
    with no_grad():
        return fn(None, *tensors)


def coordinate_of(mesh_info: MeshInfo, rank: int | None) -> Coordinate:
    """The coordinate of a rank in a mesh."""
    return mesh_info.coordinate if rank is None else mesh_info.coordinates[rank]


def memory_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensors that have the memory of a local one: one, or one for each simulated rank."""
    return tensor.shards if isinstance(tensor, RankTensor) else (tensor,)


def allocate(buffer: Tensor) -> None:
    """Give a flat buffer its memory back. What it holds is undefined."""
    for tensor in memory_of(buffer):
        tensor.untyped_storage().resize_(tensor.numel() * tensor.itemsize)


def free(buffer: Tensor) -> None:
    """Free the memory of a flat buffer. Its views stay, and are valid again once it is allocated again."""
    for tensor in memory_of(buffer):
        tensor.untyped_storage().resize_(0)


def is_allocated(buffer: Tensor) -> bool:
    """Whether a flat buffer has its memory."""
    return all(t.untyped_storage().size() >= t.numel() * t.itemsize for t in memory_of(buffer))


def same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two local tensors of one shape are the same elements of memory."""
    pairs = zip(memory_of(one), memory_of(other), strict=True)
    return all(a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.dtype == b.dtype for a, b in pairs)
