"""Names, shapes and placements of a state dict, sent to the ranks that do not have it before a transfer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch.collectives import group_named
from ..comm.mesh_routes import mesh_pair
from ..comm.rank_group import group_over
from ..errors import InputError
from ..sharding.mesh import MeshInfo
from ..sharding.placement import Replicate
from ..sharding.spec import DTensorSpec, contiguous_meta
from ..tensor.dtensor import DTensor
from ..world import RankTensor

__all__ = ["described", "specs_of"]


def specs_of(state: Mapping[str, object], mesh_info: MeshInfo | None) -> dict[str, DTensorSpec]:
    """Return the specs of all tensors. Plain ones count as replicated over the mesh, by default that of a DTensor."""
    for value in state.values():
        mesh_info = mesh_info or getattr(value if isinstance(value, DTensorSpec) else _spec(value), "mesh_info", None)
    found = {}
    for name, value in state.items():
        spec = value if isinstance(value, DTensorSpec) else _spec(value)
        if spec is None and isinstance(value, Tensor):
            if mesh_info is None:
                raise InputError(
                    "transfer got only plain tensors, so that it does not know the mesh they are on",
                    "pass source=mesh, or distribute the tensors: distribute_tensor(x, mesh, placements)",
                )
            shape = value.shards[0].shape if isinstance(value, RankTensor) else value.shape
            everywhere = [Replicate()] * len(mesh_info.sizes)
            spec = DTensorSpec(mesh_info.mesh, everywhere, contiguous_meta(shape, value.dtype))
        if spec is not None:
            found[name] = spec
    return found


def _spec(value: object) -> DTensorSpec | None:
    return value._spec if isinstance(value, DTensor) else None


def described(
    state: Mapping[str, object] | None, source: MeshInfo, target: MeshInfo
) -> tuple[dict[str, DTensorSpec], dict[str, object]]:
    """Return the specs of the tensors of a state dict, and its other values, on all ranks of both meshes."""
    if source.simulated:
        return _own(state, source)
    group = group_over(mesh_pair(source, target).ranks)
    if not group.here:
        return {}, {}
    message: list[Any] = [None if source.outside else _own(state, source)]
    device = None if source.device_type == "cpu" else torch.device(source.device_type)
    dist.broadcast_object_list(message, src=source.ranks[0], group=group_named(group.name), device=device)
    specs, others = message[0] if source.outside else _own(state, source)
    return specs, others


def _own(state: Mapping[str, object] | None, source: MeshInfo) -> tuple[dict[str, DTensorSpec], dict[str, object]]:
    if state is None:
        raise InputError(
            f"transfer got no state dict on a rank of the source, {source!r}",
            "pass the state dict on all ranks of that mesh",
        )
    others = {name: value for name, value in state.items() if not isinstance(value, (Tensor, DTensorSpec))}
    return specs_of(state, source), others
