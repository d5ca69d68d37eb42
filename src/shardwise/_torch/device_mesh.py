"""`DeviceMesh`: what shardwise reads of a mesh beyond its public names."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh, _mesh_resources


def innermost_mesh() -> DeviceMesh | None:
    """The mesh of the innermost `with mesh:` block, or None outside one. Relies on `_mesh_resources.mesh_stack`."""
    stack = _mesh_resources.mesh_stack
    return stack[-1] if stack else None


def parallel_instances(mesh: DeviceMesh) -> torch.Tensor:
    """The ranks of every parallel instance of a mesh, of shape `(instances, *mesh.shape)`.

    `mesh["tp"]` of a mesh of shape (2, 4) has 2 instances of 4 ranks. Relies on `_layout` and `_rank_map`.
    """
    instances: torch.Tensor = mesh._layout.remap_to_tensor(mesh._rank_map)
    return instances.reshape(-1, *mesh.shape)


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that this one was sliced from, or itself. Relies on `_get_root_mesh`."""
    return mesh._get_root_mesh()


def flattened_meshes(mesh: DeviceMesh) -> list[DeviceMesh]:
    """The one-axis meshes made by flattening axes of a mesh's root. Relies on `_flatten_mapping`."""
    return list(root_mesh(mesh)._flatten_mapping.values())


def mesh_without_groups(device_type: str, ranks: torch.Tensor, names: Sequence[str] | None, rank: int) -> DeviceMesh:
    """A mesh for which no process groups are made. Relies on the arguments `_init_backend` and `_rank`."""
    name_tuple = None if names is None else tuple(names)
    return DeviceMesh(device_type, ranks, mesh_dim_names=name_tuple, _init_backend=False, _rank=rank)


def has_groups(mesh: DeviceMesh) -> bool:
    """Whether a mesh has process groups: False for those of `mesh_without_groups`. Relies on `_dim_group_names`."""
    return hasattr(mesh, "_dim_group_names")
