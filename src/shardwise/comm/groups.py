"""Adopt a mesh: create a process group for every set of its axes, once, in the same order on all ranks.

A plan never creates groups. Their names come from a counter in each process, so ranks that create groups at different
times would give different groups the same name. A mesh of all ranks is adopted when its first tensor is made, which
all ranks do. A submesh uses the groups that exist already, and otherwise communicates axis by axis.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from contextlib import suppress

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .._torch.device_mesh import flattened_meshes, has_groups, root_mesh
from .._torch.dynamo import real_object
from .._torch.modes import without_modes
from ..errors import MeshError
from ..sharding.mesh import (
    Axes,
    MeshInfo,
    group_name,
    group_ranks,
    mesh_info_of,
    world_group_name,
)
from ..sharding.once import making
from ..sharding.runtime import active_runtime
from ..world import current_world, groups_of, register_group
from .rank_group import named_group

_waiting: list[Callable[[], None]] = []


def before_first_use(run: Callable[[], None]) -> None:
    """Defer a slow function from the import of shardwise to the first use of a mesh."""
    _waiting.append(run)


def first_use() -> None:
    """Run the functions deferred by `before_first_use`."""
    while _waiting:
        _waiting.pop()()


def adopt(mesh: DeviceMesh) -> MeshInfo:
    """Return the `MeshInfo` of a mesh. The first call for a mesh creates its process groups."""
    found = active_runtime().adopted.get(id(mesh))
    if found is not None:
        return found[1]
    with making, without_modes():
        return _adopt(mesh)


def _adopt(mesh: DeviceMesh) -> MeshInfo:
    first_use()
    mesh = real_object(mesh)
    mesh_info = mesh_info_of(mesh)
    if not mesh_info.adopted:
        if has_groups(mesh):
            # The MeshInfo may have been made for an equal mesh that was loaded from a file, and has no groups.
            mesh_info.mesh = mesh
        _check_membership(mesh_info)
        mesh_info.simulated = current_world() is not None
        if mesh_info.simulated:
            mesh_info.outside = False  # this process runs all ranks
            _simulated_groups(mesh_info)
        else:
            _process_groups(mesh_info)
        mesh_info.adopted = True
    mesh_info.runtime.adopted[id(mesh)] = mesh, mesh_info
    return mesh_info


def _check_membership(mesh_info: MeshInfo) -> None:
    ranks_of_mesh = mesh_info.instances.flatten().tolist()
    if max(ranks_of_mesh) >= mesh_info.world_size:
        raise MeshError(
            f"{mesh_info!r} has the ranks {ranks_of_mesh}, but this world has {mesh_info.world_size}",
            "use a mesh of ranks that exist; shardwise.checkpoint loads a saved tensor onto another mesh",
        )
    if not has_groups(mesh_info.mesh) and not mesh_info.outside and current_world() is None:
        raise MeshError(
            f"{mesh_info!r} was loaded from a file, and no equal mesh has been used in this world",
            "make the mesh with init_device_mesh, and a first tensor on it, before loading",
        )


def common_root(*parts: MeshInfo) -> DeviceMesh | None:
    """Return the mesh that all of these are slices of, or None.

    Equal slices of different meshes share one `MeshInfo`, whose mesh may have been sliced from another root.
    """
    known = [*(part.mesh for part in parts), *(mesh for mesh, _ in parts[0].runtime.adopted.values())]
    roots = {id(root): root for root in map(root_mesh, known)}
    return next((root for root in roots.values() if all(_is_slice(part, root) for part in parts)), None)


def _is_slice(part: MeshInfo, root: DeviceMesh) -> bool:
    names = part.mesh.mesh_dim_names
    if names is None:
        return part.mesh == root
    with suppress(KeyError, ValueError, RuntimeError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns of slices with flattened axes
        found = mesh_info_of(root[names])
        # PyTorch 2.11 takes a mesh that was flattened and a slice by the name of that axis for different ones.
        return (found.names, found.sizes, found.ranks) == (part.names, part.sizes, part.ranks)
    return False


def axis_sets(ndim: int) -> list[Axes]:
    """Return all sets of two or more axes, in the order in which their groups are created."""
    return [axes for count in range(2, ndim + 1) for axes in itertools.combinations(range(ndim), count)]


def _axis_groups(mesh_info: MeshInfo) -> dict[Axes, str]:
    """Return the names of the mesh's own groups, one for each axis."""
    try:
        return {(axis,): group_name(mesh_info.mesh, axis) for axis in range(len(mesh_info.sizes))}
    except (RuntimeError, LookupError, ValueError):
        raise MeshError(
            f"{mesh_info!r} belongs to a world that has ended", "make it again in this one with init_device_mesh"
        ) from None


def _simulated_groups(mesh_info: MeshInfo) -> None:
    ndim = len(mesh_info.sizes)
    if has_groups(mesh_info.mesh) and dist.get_rank() in mesh_info.ranks:
        mesh_info.groups.update(_axis_groups(mesh_info))
    else:  # to PyTorch this process is rank 0, and it makes no groups without it: any group of the right size will do
        sizes = enumerate(mesh_info.sizes)
        mesh_info.groups.update({(axis,): dist.new_group(range(size)).group_name for axis, size in sizes})
    for axes in axis_sets(ndim):
        mesh_info.groups[axes] = f"shardwise:{id(mesh_info)}:{axes}"
    for axes, name in mesh_info.groups.items():
        register_group(name, mesh_info.rank_groups(axes))


def _process_groups(mesh_info: MeshInfo) -> None:
    if mesh_info.outside:  # a rank outside the mesh makes the same plans, and never communicates on it
        mesh_info.groups.update({(axis,): "" for axis in range(len(mesh_info.sizes))})
        return
    mesh_info.groups.update(_axis_groups(mesh_info))
    existing = _existing_groups(mesh_info)
    may_create = root_mesh(mesh_info.mesh) is mesh_info.mesh and mesh_info.covers_world()
    for axes in axis_sets(len(mesh_info.sizes)):
        ranks = mesh_info.rank_groups(axes)
        name = existing.get(_partition(ranks))
        if name is None and may_create:
            name = _create(ranks)
        if name is not None:
            mesh_info.groups[axes] = name
    for axes in mesh_info.groups:
        ranks_here = next(tuple(ranks) for ranks in mesh_info.rank_groups(axes) if dist.get_rank() in ranks)
        if ranks_here != tuple(sorted(ranks_here)):
            # PyTorch's groups have their ranks in ascending order; data would be put together in that order.
            mesh_info.groups[axes] = named_group(ranks_here)


def _existing_groups(mesh_info: MeshInfo) -> dict[tuple[tuple[int, ...], ...], str]:
    """Return the names of the groups of flattened axes and of the root mesh, by how they partition the ranks."""
    found = {}
    for flattened in flattened_meshes(mesh_info.mesh):
        found[_partition(mesh_info_of(flattened).rank_groups((0,)))] = group_name(flattened, 0)
    root = mesh_info_of(root_mesh(mesh_info.mesh))
    for axes, name in root.groups.items():
        found[_partition(root.rank_groups(axes))] = name
    found[(tuple(range(mesh_info.world_size)),)] = world_group_name()
    return found


def _partition(groups: list[list[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(sorted(tuple(group) for group in groups))


def _create(groups: list[list[int]]) -> str | None:
    mine = None
    for ranks in groups:
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            mine = group.group_name
    return mine


def ranks_of_group(name: str) -> list[tuple[int, ...]]:
    """Return the ranks of the group with this name; in a simulated world, of all groups that share the name."""
    return [group_ranks(name)] if current_world() is None else list(groups_of(name))
