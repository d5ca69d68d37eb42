"""Global tensors that every rank holds: plain ones wrapped as replicated DTensors, and gathered ones."""

from __future__ import annotations

from torch import Tensor

from .._torch.backward_pass import materialized
from .._torch.symbols import SymbolicSize
from ..comm.redistribute import redistribute_local
from ..sharding.base import DTensorBase
from ..sharding.memory_order import contiguous_meta, meta_of, overlaps
from ..sharding.placement import Replicate
from ..sharding.spec import DTensorSpec
from ..world import RankTensor, replicate


def as_replicated(tensor: Tensor, like: DTensorBase) -> DTensorBase:
    """Return a plain tensor that is the same on all ranks as a replicated DTensor on the mesh of another."""
    mesh_info = like._spec.mesh_info
    local = materialized(tensor.detach())
    meta = meta_of(local)
    if not all(isinstance(step, (int, SymbolicSize)) for step in meta.stride) or overlaps(meta):
        local, meta = local.contiguous(), contiguous_meta(local.shape, local.dtype)
    if mesh_info.simulated and not isinstance(local, RankTensor):
        local = replicate(local, len(mesh_info.ranks))
    spec = DTensorSpec(mesh_info.mesh, (Replicate(),) * len(mesh_info.sizes), meta)
    return type(like).wrap(local, spec)


def gathered(tensor: DTensorBase) -> Tensor:
    """Return the global tensor, on every rank, as a local tensor. It may be the local shard itself."""
    return redistribute_local(tensor._local_shard, tensor._spec, tensor._spec.replicated())
