"""`DeviceMesh`: what shardwise reads of a mesh beyond its public names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, _mesh_resources

from .modes import without_modes


def innermost_mesh() -> DeviceMesh | None:
    """Return the mesh of the innermost `with mesh:` block, or None. Relies on `_mesh_resources.mesh_stack`."""
    stack = _mesh_resources.mesh_stack
    return stack[-1] if stack else None


def parallel_instances(mesh: DeviceMesh) -> torch.Tensor:
    """Return the ranks of every parallel instance of a mesh, of shape `(instances, *mesh.shape)`.

    `mesh["tp"]` of a mesh of shape (2, 4) has 2 instances of 4 ranks. Relies on `_layout` and `_rank_map`.
    """
    if isinstance(mesh, MeshOfOthers):
        return mesh.instances
    instances: torch.Tensor = mesh._layout.remap_to_tensor(mesh._rank_map)
    return instances.reshape(-1, *mesh.shape)


def listed(ranks: torch.Tensor) -> Any:
    """Return the ranks of a mesh as nested lists. No mode sees this: modes that record ops refuse reads of tensors."""
    with without_modes(), torch._C.DisableTorchFunction():
        return ranks.tolist()


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that this one was sliced from, or itself. Relies on `_get_root_mesh`."""
    return mesh._get_root_mesh()


def flattened_meshes(mesh: DeviceMesh) -> list[DeviceMesh]:
    """Return the one-axis meshes made by flattening axes of a mesh's root. Relies on `_flatten_mapping`."""
    return list(root_mesh(mesh)._flatten_mapping.values())


def mesh_without_groups(device_type: str, ranks: torch.Tensor, names: Sequence[str] | None, rank: int) -> DeviceMesh:
    """Return a mesh without process groups. Relies on the arguments `_init_backend` and `_rank`."""
    name_tuple = None if names is None else tuple(names)
    return DeviceMesh(device_type, ranks, mesh_dim_names=name_tuple, _init_backend=False, _rank=rank)


def has_groups(mesh: DeviceMesh) -> bool:
    """Return whether a mesh has process groups.

    False for those of `mesh_without_groups`. Relies on `_dim_group_names`.
    """
    return hasattr(mesh, "_dim_group_names")


class MeshOfOthers(DeviceMesh):
    """A mesh as its first rank sees it, without process groups, on a process that need not be one of its ranks.

    PyTorch cannot slice a mesh on a process outside it. `instances` has the shape `(parallel instances, *sizes)`.
    Relies on the arguments `_init_backend` and `_rank`, and on `_root_mesh`.
    """

    def __init__(self, device_type: str, instances: torch.Tensor, names: Sequence[str]) -> None:
        first = instances[0]
        super().__init__(
            device_type, first, mesh_dim_names=tuple(names), _init_backend=False, _rank=int(first.flatten()[0])
        )
        self.instances = instances

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        chosen = (names,) if isinstance(names, str) else tuple(names)
        known = self.mesh_dim_names or ()
        if not chosen or not set(chosen) <= set(known):
            raise KeyError(f"no axes {chosen} in a mesh of {known}")
        if chosen == known:
            return self
        axes = [1 + known.index(name) for name in chosen]
        others = [axis for axis in range(1, self.instances.ndim) if axis not in axes]
        sizes = [self.instances.shape[axis] for axis in axes]
        sliced = MeshOfOthers(self.device_type, self.instances.permute(0, *others, *axes).reshape(-1, *sizes), chosen)
        sliced._root_mesh = root_mesh(self)
        return sliced

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, MeshOfOthers)
            and (self.device_type, self.mesh_dim_names) == (other.device_type, other.mesh_dim_names)
            and torch.equal(self.instances, other.instances)
        )

    def __hash__(self) -> int:
        return hash((self.device_type, self.mesh_dim_names, tuple(self.instances.flatten().tolist())))
