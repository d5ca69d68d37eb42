"""The spec of a tensor on another mesh."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..comm.groups import adopt
from ..comm.mesh_routes import mesh_pair
from ..errors import MeshError
from ..sharding.base import DTensorBase
from ..sharding.mesh import mesh_info_of
from ..sharding.placement import Placements
from ..sharding.spec import DTensorSpec, contiguous_meta


def target_on(mesh: DeviceMesh, placements: Placements, tensor: DTensorBase) -> DTensorSpec:
    """Return the spec of a tensor after a redistribution to these placements on a mesh, its own or another one."""
    spec = tensor._spec
    if mesh_info_of(mesh) is spec.mesh_info:
        return spec.with_placements(placements)
    target_info = adopt(mesh)
    if torch.is_grad_enabled() and tensor.requires_grad and mesh_pair(spec.mesh_info, target_info).copies:
        raise MeshError(
            f"redistribute of {spec!r} with gradients to {target_info!r}, a submesh with "
            f"{target_info.instances.shape[0]} parallel instances: each would have a gradient of its own",
            "redistribute to the mesh that it was sliced from, and state there how local gradients are combined: "
            "to_local(grad_placements=[Partial(), ...])",
        )
    return spec_on(mesh, placements, spec)


def spec_on(mesh: DeviceMesh, placements: Placements, spec: DTensorSpec) -> DTensorSpec:
    """Return the spec of a row-major tensor of the same shape and dtype with placements on another mesh."""
    return DTensorSpec(mesh, placements, contiguous_meta(spec.shape, spec.dtype))
