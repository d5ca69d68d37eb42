"""Adopting a mesh: a process group for every set of its axes, made once, in one order, on all ranks.

Groups are never made from a plan: their names come from a counter in each process, so ranks that make groups at
different moments can end up summing with strangers. A mesh that spans the world is adopted when its first tensor is
made, which all its ranks do. A submesh uses the groups that exist already and otherwise talks axis by axis.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..errors import MeshError
from ..mesh import (
    Axes,
    MeshView,
    adopted_view,
    flattened_meshes,
    group_name,
    group_ranks,
    has_groups,
    remember_adopted,
    root_mesh,
    view_of,
    world_group_name,
)
from ..world import current_world, groups_of, register_group

_waiting: list[Callable[[], None]] = []


def before_first_use(run: Callable[[], None]) -> None:
    """Run this when the first mesh is adopted: what importing should not take time for."""
    _waiting.append(run)


def first_use() -> None:
    """Run what waits for the first mesh."""
    while _waiting:
        _waiting.pop()()


def adopt(mesh: DeviceMesh) -> MeshView:
    """The view of a mesh with its groups made, ready to communicate."""
    ready = adopted_view(mesh)
    if ready is not None:
        return ready
    first_use()
    view = view_of(mesh)
    if not view.adopted:
        if has_groups(mesh):
            view.mesh = mesh  # the view may have been made for one loaded from a file, or of a world that has ended
        _check_membership(view)
        view.simulated = current_world() is not None
        if view.simulated:
            _simulated_groups(view)
        else:
            _process_groups(view)
        view.adopted = True
    remember_adopted(mesh, view)
    return view


def _check_membership(view: MeshView) -> None:
    ranks_of_mesh = view.instances.flatten().tolist()
    if max(ranks_of_mesh) >= view.world_size:
        raise MeshError(
            f"{view!r} has the ranks {ranks_of_mesh}, but this world has {view.world_size}",
            "use a mesh of ranks that exist; torch.distributed.checkpoint brings a saved tensor to another mesh",
        )
    if current_world() is None:
        outside = [] if view.coordinate else [dist.get_rank()]
    else:
        outside = [rank for rank, coordinate in enumerate(view.coordinates) if not coordinate]
    if not has_groups(view.mesh):
        raise MeshError(
            f"{view!r} was loaded from a file and no mesh like it was used yet in this world",
            "make the mesh with init_device_mesh and a first tensor on it before loading",
        )
    if outside:
        ranks = f"rank {outside[0]} is" if len(outside) == 1 else f"ranks {outside} are"
        raise MeshError(
            f"{ranks} not in {view!r}, whose ranks are {ranks_of_mesh}",
            "use a mesh that holds every rank that runs this line",
        )


def axis_sets(ndim: int) -> list[Axes]:
    """All sets of two or more axes, in the order in which their groups are made."""
    return [axes for count in range(2, ndim + 1) for axes in itertools.combinations(range(ndim), count)]


def _axis_groups(view: MeshView) -> dict[Axes, str]:
    """The groups that the mesh came with, one for each axis."""
    try:
        return {(axis,): group_name(view.mesh, axis) for axis in range(len(view.sizes))}
    except (RuntimeError, LookupError, ValueError):
        raise MeshError(
            f"{view!r} belongs to a world that has ended", "make it again in this one with init_device_mesh"
        ) from None


def _simulated_groups(view: MeshView) -> None:
    ndim = len(view.sizes)
    view.groups.update(_axis_groups(view))
    for axes in axis_sets(ndim):
        view.groups[axes] = f"shardwise:{id(view)}:{axes}"
    for axes, name in view.groups.items():
        register_group(name, view.rank_groups(axes))


def _process_groups(view: MeshView) -> None:
    view.groups.update(_axis_groups(view))
    existing = _existing_groups(view)
    may_create = root_mesh(view.mesh) is view.mesh and view.covers_world()
    for axes in axis_sets(len(view.sizes)):
        ranks = view.rank_groups(axes)
        name = existing.get(_partition(ranks))
        if name is None and may_create:
            name = _create(ranks)
        if name is not None:
            view.groups[axes] = name


def _existing_groups(view: MeshView) -> dict[tuple[tuple[int, ...], ...], str]:
    """Groups that are there already, by the way they part the ranks: flattened axes and the root mesh's groups."""
    found = {}
    for flattened in flattened_meshes(view.mesh):
        found[_partition(view_of(flattened).rank_groups((0,)))] = group_name(flattened, 0)
    root = view_of(root_mesh(view.mesh))
    for axes, name in root.groups.items():
        found[_partition(root.rank_groups(axes))] = name
    found[(tuple(range(view.world_size)),)] = world_group_name()
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
    """The ranks of this process's group with this name; in the simulated world of all its parallel instances."""
    return [group_ranks(name)] if current_world() is None else list(groups_of(name))
