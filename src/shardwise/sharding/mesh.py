"""Information about a `DeviceMesh`: axis sizes and names, and the coordinate of every rank.

`DeviceMesh` and `init_device_mesh` are PyTorch's own. A submesh such as `mesh["tp"]` has several parallel instances
in the world, one for each coordinate on the axes left out; a rank belongs to one of them. A `MeshInfo` describes them
all, as the simulated world needs. Equal meshes of one world share one `MeshInfo`, so that specs compare by identity.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, cast
from weakref import WeakValueDictionary, ref

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .._torch.collectives import group_named
from .._torch.device_mesh import innermost_mesh, listed, mesh_without_groups, parallel_instances
from .._torch.dynamo import real_object
from .._torch.modes import without_modes
from ..errors import InputError, MeshError
from .once import making
from .runtime import Runtime, WorldState, runtime_of_world

if TYPE_CHECKING:
    from .spec import DTensorSpec

__all__ = [
    "DeviceMesh",
    "MeshInfo",
    "MeshReference",
    "current_mesh",
    "init_device_mesh",
    "mesh_info_of",
    "mesh_of_all_ranks",
]

_OF_ALL_RANKS: WorldState[dict[str, DeviceMesh]] = WorldState(dict)

Axes = tuple[int, ...]
Coordinate = tuple[int, ...]


class MeshInfo:
    """A mesh's axes, the coordinates of its ranks, and the name of the process group over each set of axes.

    `groups` is filled when the mesh is adopted (see `comm.groups`); until then nothing can communicate over it.
    `specs` are the interned specs of tensors on this mesh, so that they end with it.
    """

    def __init__(self, mesh: DeviceMesh, runtime: Runtime) -> None:
        self.mesh = mesh
        self.runtime = runtime
        self.device_type = mesh.device_type
        self.sizes: tuple[int, ...] = tuple(mesh.shape)
        self.names: tuple[str, ...] = mesh.mesh_dim_names or tuple(str(axis) for axis in range(mesh.ndim))
        self.world_size: int = dist.get_world_size()
        # Whether this rank is not in the mesh. It then has the coordinate of the first rank, plans as that, and runs
        # nothing.
        self.outside = dist.get_rank() not in self.ranks
        self.coordinate: Coordinate = (0,) * mesh.ndim if self.outside else tuple(mesh.get_coordinate() or ())
        self.groups: dict[Axes, str] = {}
        self.specs: WeakValueDictionary[tuple[object, ...], DTensorSpec] = WeakValueDictionary()
        self.adopted = False
        self.simulated = False
        self.backend = dist.get_backend()
        self.reference = MeshReference(self)

    @cached_property
    def instances(self) -> torch.Tensor:
        """The ranks of every parallel instance of this mesh, of shape `(instances, *sizes)`."""
        with without_modes():  # a fake tensor has no ranks to read
            return parallel_instances(self.mesh)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of all parallel instances, ascending. A simulated local tensor has a shard for each of them."""
        return tuple(sorted(listed(self.instances.flatten())))

    @cached_property
    def coordinates(self) -> tuple[Coordinate, ...]:
        """For each of `ranks` its coordinate in its own instance."""
        places = list(itertools.product(*map(range, self.sizes)))
        with without_modes():
            instances = listed(self.instances.flatten(1))
        found = {rank: at for instance in instances for rank, at in zip(instance, places, strict=True)}
        return tuple(found[rank] for rank in self.ranks)

    def covers_world(self) -> bool:
        """Return whether every rank of the world is in this mesh or in a parallel instance of it."""
        return len(self.ranks) == self.world_size

    def rank_groups(self, axes: Axes) -> list[list[int]]:
        """Return all groups of ranks that differ only on these axes, each in mesh order."""
        others = [1 + axis for axis in range(len(self.sizes)) if axis not in axes]
        with without_modes():
            grouped = self.instances.permute(0, *others, *(1 + axis for axis in axes))
            grouped = grouped.reshape(-1, math.prod(self.sizes[axis] for axis in axes))
        return cast(list[list[int]], listed(grouped))

    def axis_index(self, name: str | int) -> int:
        """Return the index of an axis given by name or index."""
        if isinstance(name, int) and -len(self.sizes) <= name < len(self.sizes):
            return name % len(self.sizes)
        if isinstance(name, str) and name in self.names:
            return self.names.index(name)
        raise MeshError(f"no axis {name!r} in {self!r}", f"its axes are {', '.join(self.names)}")

    def __deepcopy__(self, memo: dict[int, object]) -> MeshInfo:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        # Includes all that compiled graphs depend on: the compiler's cache on disk has pickled inputs as keys.
        return _mesh_info_like, (mesh_description(self.mesh), self.coordinate, self.world_size, self.simulated)

    def __repr__(self) -> str:
        axes = ", ".join(f"{name}={size}" for name, size in zip(self.names, self.sizes, strict=True))
        return f"mesh({axes})"


class MeshReference(ref[MeshInfo]):
    """A weak reference to a `MeshInfo`, for objects that may outlive its world. Two of one `MeshInfo` are equal.

    It can be hashed after the end of the world, too, and is pickled as the `MeshInfo`.
    """

    __slots__ = ()

    def __new__(cls, mesh_info: MeshInfo) -> MeshReference:
        """Make a reference, and compute its hash, which is cached then: a dead reference cannot compute it."""
        reference = super().__new__(cls, mesh_info)
        hash(reference)
        return reference

    def get(self) -> MeshInfo:
        """Return the `MeshInfo`; raise an error if its world has ended."""
        mesh_info = self()
        if mesh_info is None:
            raise MeshError(
                "a compiled function makes tensors on a mesh whose world has ended",
                "call torch.compiler.reset(), and compile the function again in the present world",
            )
        return mesh_info

    def __deepcopy__(self, memo: dict[int, object]) -> MeshReference:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return _reference_to, (self.get(),)


def _reference_to(mesh_info: MeshInfo) -> MeshReference:
    return mesh_info.reference


def require_world() -> None:
    """Raise an error if torch.distributed is not initialised, or was destroyed."""
    if not dist.is_initialized():
        raise MeshError(
            "there is no world: torch.distributed is not initialised",
            "start under torchrun and call init_device_mesh, or use `with shardwise.simulate(8):`",
        )


def mesh_info_of(mesh: DeviceMesh) -> MeshInfo:
    """Return the `MeshInfo` that this mesh shares with all meshes equal to it in this world."""
    mesh = real_object(mesh)
    if not isinstance(mesh, DeviceMesh):
        raise InputError(
            f"device_mesh is a {type(mesh).__name__}", "pass a DeviceMesh, e.g. init_device_mesh('cpu', (4,))"
        )
    require_world()
    runtime = runtime_of_world()
    mesh_info = runtime.meshes.get(mesh)
    if mesh_info is None:
        with making:
            mesh_info = runtime.meshes.setdefault(mesh, MeshInfo(mesh, runtime))
    return mesh_info


def current_mesh() -> DeviceMesh:
    """Return the mesh of the innermost `with mesh:` block; raise an error outside of one."""
    mesh = innermost_mesh()
    if mesh is None:
        raise MeshError("no device_mesh was given", "pass one, or call inside a `with mesh:` block")
    return mesh


def mesh_of_all_ranks() -> DeviceMesh:
    """Return a mesh of one axis, "dp", over all ranks: the same object in each call in one world."""
    require_world()
    made = _OF_ALL_RANKS.of(runtime_of_world())
    if "mesh" not in made:
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        made["mesh"] = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("dp",))
    return made["mesh"]


# ---- process groups by name -----------------------------------------------------------------------------------------


def world_group_name() -> str:
    """Return the name of the default process group."""
    world = dist.group.WORLD
    assert world is not None, "callers have a mesh, so there is a world"
    return world.group_name


def group_name(mesh: DeviceMesh, axis: int) -> str:
    """Return the name of this rank's process group along one axis."""
    return mesh.get_group(axis).group_name


def group_ranks(name: str) -> tuple[int, ...]:
    """Return the ranks of this rank's process group with this name."""
    return tuple(dist.get_process_group_ranks(group_named(name)))


GROUP_TEXTS: WorldState[dict[str, str]] = WorldState(dict)
"""Texts for groups that belong to no mesh, by group name."""


def axes_of_group(name: str) -> str:
    """Return the axes of a group as text, by the last mesh adopted with it; the group's name if there is none."""
    found = mesh_of_group(name)
    if found is None:
        return GROUP_TEXTS.of(runtime_of_world()).get(name, name)
    return names_text([found[0].names[axis] for axis in found[1]])


def mesh_of_group(name: str) -> tuple[MeshInfo, Axes] | None:
    """Return the last mesh that was adopted with a group, and the axes of the group; None if there is none.

    Several meshes share the group of all ranks. The program is likely to use the one that it made last.
    """
    for _, mesh_info in reversed(runtime_of_world().adopted.values()):
        for axes, its_name in mesh_info.groups.items():
            if its_name == name:
                return mesh_info, axes
    return None


def names_text(names: Sequence[str]) -> str:
    """Return axis names as text: `dp`, or `(dp, tp)`."""
    return names[0] if len(names) == 1 else f"({', '.join(names)})"


# ---- meshes in files ------------------------------------------------------------------------------------------------

MeshDescription = tuple[str, torch.Tensor, tuple[str, ...] | None]
"""Device type, ranks and axis names of a mesh, by which it is pickled."""


def mesh_description(mesh: DeviceMesh) -> MeshDescription:
    """Return the description by which a mesh is pickled."""
    return mesh.device_type, mesh.mesh, mesh.mesh_dim_names


def mesh_like(description: MeshDescription) -> DeviceMesh:
    """Return the mesh of this world with this description; if there is none yet, one without process groups.

    No process group is made here: ranks that make groups at different moments give them different names, and would
    then communicate in groups that do not match. A mesh without groups takes those of the first equal mesh adopted.
    A rank outside a submesh, such as the first row of a mesh, gets the parallel instance that it belongs to.
    """
    device_type, ranks, names = description
    initialised = dist.is_initialized()
    known = list(runtime_of_world().meshes.values()) if initialised else []
    alike = [m for m in known if (m.device_type, m.mesh.mesh_dim_names, m.sizes) == (device_type, names, ranks.shape)]
    for mesh_info in alike:
        if torch.equal(mesh_info.mesh.mesh, ranks):
            return mesh_info.mesh
    for mesh_info in alike:
        if any(torch.equal(instance, ranks) for instance in mesh_info.instances):
            return mesh_info.mesh
    return mesh_without_groups(device_type, ranks, names, dist.get_rank() if initialised else 0)


def _mesh_info_like(description: MeshDescription, *graphs_depend_on: object) -> MeshInfo:
    return mesh_info_of(mesh_like(description))
