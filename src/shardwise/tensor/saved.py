"""Load pickled tensors, and check that this rank may load them.

A file of `torch.save` holds the shard of the rank that wrote it, together with the coordinate of that rank. It loads on
every rank that has the same shard: the one that wrote it, and those that replicate it. Elsewhere loading is refused,
since the tensor would silently have another rank's data. Ranks that are not in the mesh hold nothing of the tensor:
their files load on each other.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from ..comm.on_ranks import shard_outside
from ..errors import WorldError
from ..sharding.layout import Coordinate
from ..sharding.spec import DTensorSpec
from ..world import RankTensor, current_world, replicate

_FIX = "save with torch.distributed.checkpoint, or save x.full_tensor(), or one file for each rank"


def loaded_shard(local: Tensor, spec: DTensorSpec, saved_at: Coordinate) -> Tensor:
    """Return this rank's local shard of a tensor that the rank at `saved_at` saved; raise an error if it is another.

    A file of a simulated world holds the shards of all ranks, so every process finds its own in it.
    """
    if current_world() is not None:
        if isinstance(local, RankTensor):
            return local
        if not spec.is_replicated():
            raise WorldError(f"{_held(spec, saved_at)}, but a simulated world needs all shards", _FIX)
        return replicate(local, len(spec.mesh_info.ranks))
    here, nothing = spec.mesh_info.coordinate, shard_outside(spec.ndim, spec.dtype, local.device)
    if isinstance(local, RankTensor):
        return nothing if spec.mesh_info.outside else local.shards[spec.mesh_info.ranks.index(dist.get_rank())]
    if spec.mesh_info.outside:
        if local.shape != nothing.shape:
            raise WorldError(f"{_held(spec, saved_at)}, but this rank is not in that mesh", _FIX)
        return local
    if local.shape == nothing.shape != spec.local_shape(saved_at):
        raise WorldError(f"the file was saved by a rank that is not in {spec.mesh_info!r}, and holds no shard", _FIX)
    if saved_at != here and not _same_shard(spec, saved_at, here):
        raise WorldError(f"{_held(spec, saved_at)}, but this rank, at {_text(spec, here)}, has another shard", _FIX)
    return local


def _same_shard(spec: DTensorSpec, one: Coordinate, other: Coordinate) -> bool:
    """Return whether two ranks hold the same values: the same indices, and the same summands."""
    layout = spec.layout
    return all(one[axis] == other[axis] for axis, _ in layout.partial) and layout.runs(one) == layout.runs(other)


def _held(spec: DTensorSpec, saved_at: Coordinate) -> str:
    return f"the file holds the shard at {_text(spec, saved_at)} of {spec!r} on {spec.mesh_info!r}"


def _text(spec: DTensorSpec, at: Coordinate) -> str:
    return ", ".join(f"{name}={index}" for name, index in zip(spec.mesh_info.names, at, strict=True))
