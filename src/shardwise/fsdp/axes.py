"""The mesh axes of `fully_shard`: the one that shards, the one that replicates, and the same axes in other meshes."""

from __future__ import annotations

import warnings
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .._torch.device_mesh import root_mesh
from ..comm.groups import adopt, common_root
from ..comm.rank_group import named_group
from ..errors import InputError, MeshError
from ..sharding.mesh import MeshInfo, mesh_of_all_ranks
from ..sharding.runtime import WorldState
from ..world import register_group

_NEIGHBOURS: WorldState[dict[tuple[MeshInfo, int], str]] = WorldState(dict)


@dataclass(frozen=True)
class DataAxes:
    """A mesh of one axis, which shards, or of two: the first replicates, the second shards."""

    mesh_info: MeshInfo

    @property
    def shard_axis(self) -> int:
        """The axis that shards."""
        return len(self.mesh_info.sizes) - 1

    @property
    def replicates(self) -> bool:
        """Whether there is an axis that replicates."""
        return len(self.mesh_info.sizes) == 2

    @property
    def ranks(self) -> int:
        """The number of shards."""
        return self.mesh_info.sizes[-1]

    @cached_property
    def shard_group(self) -> str:
        """The name of the process group along the axis that shards."""
        return self.mesh_info.groups[(self.shard_axis,)]

    @cached_property
    def replicate_group(self) -> str:
        """The name of the process group along the axis that replicates."""
        return self.mesh_info.groups[(0,)]

    def group_of_neighbours(self, count: int) -> str:
        """Return the name of the group of `count` neighbouring ranks along the axis that shards, made on first use."""
        made = _NEIGHBOURS.of(self.mesh_info.runtime)
        key = (self.mesh_info, count)
        if key not in made:
            made[key] = self._make_neighbours(count)
        return made[key]

    def _make_neighbours(self, count: int) -> str:
        lines = self.mesh_info.rank_groups((self.shard_axis,))
        groups = [line[start : start + count] for line in lines for start in range(0, len(line), count)]
        if self.mesh_info.simulated:
            name = dist.new_group(range(len(groups[0]))).group_name  # to PyTorch, this process is rank 0
            register_group(name, groups)
            return name
        own = next(ranks for ranks in groups if dist.get_rank() in ranks)
        # Only the ranks of this mesh call this, which need not be all ranks of the world.
        return named_group(tuple(own))

    def inside(self, mesh_info: MeshInfo) -> tuple[int, ...] | None:
        """Return the axes of another mesh that connect the same ranks as these axes, or None.

        For a flattened axis these are the axes that were flattened.
        """
        if mesh_info is self.mesh_info:
            return tuple(range(len(mesh_info.sizes)))
        by_name = tuple(axis for axis, name in enumerate(mesh_info.names) if name in self.mesh_info.names)
        wanted = _partition(self.mesh_info, tuple(range(len(self.mesh_info.sizes))))
        return next((axes for axes in (by_name, *mesh_info.groups) if _partition(mesh_info, axes) == wanted), None)


@dataclass(frozen=True)
class DataParallelMeshDims:
    """The names of the data-parallel axes of a mesh: one to shard over, and perhaps one to replicate over.

    >>> model = fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    >>> model[0].weight.spec
    f32[8@dp, 4]
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def slice_of(self, mesh: DeviceMesh | None) -> DeviceMesh:
        """Return the slice of a mesh with these axes."""
        names = [name for name in (self.replicate, self.shard) if name is not None]
        if mesh is None or self.shard is None or not all(isinstance(name, str) for name in names):
            raise MeshError(
                f"fully_shard got dp_mesh_dims={self!r} and mesh={mesh}",
                "pass the mesh of all axes, and one axis to shard over, perhaps one to replicate over",
            )
        return mesh[tuple(str(name) for name in names)]


def _partition(mesh_info: MeshInfo, axes: tuple[int, ...]) -> set[frozenset[int]]:
    return {frozenset(ranks) for ranks in mesh_info.rank_groups(axes)} if axes else set()


def data_axes(mesh: DeviceMesh | None) -> DataAxes:
    """Return the data axes of the mesh passed to `fully_shard`, by default a mesh of all ranks."""
    mesh = mesh if mesh is not None else mesh_of_all_ranks()
    if not isinstance(mesh, DeviceMesh):
        raise InputError(f"fully_shard got mesh={mesh!r}", 'pass a DeviceMesh of one or two axes, such as mesh["dp"]')
    if mesh.ndim > 2:
        raise MeshError(
            f"fully_shard got a mesh of {mesh.ndim} axes, {mesh.mesh_dim_names}",
            'pass the axis that shards, mesh["dp"], or those that replicate and shard, mesh["replicate", "dp"]',
        )
    return DataAxes(adopt(mesh))


def joined_mesh(data: DataAxes, others: MeshInfo) -> MeshInfo:
    """Return the mesh of the data axes and the axes of `others`, a slice of their common root mesh."""
    root = common_root(data.mesh_info, others)
    if root is not None:
        names = root.mesh_dim_names or ()
        flattened = tuple(name for name in data.mesh_info.names if name not in names)
        wanted = {*data.mesh_info.names, *others.names}
        with suppress(KeyError, ValueError, RuntimeError), warnings.catch_warnings():
            # PyTorch warns of slices with flattened axes, and has no other way to make them.
            warnings.simplefilter("ignore")
            return adopt(root[(*flattened, *(name for name in names if name in wanted))])
    raise MeshError(
        f"fully_shard over {data.mesh_info!r} got a parameter that is sharded over {others!r}, and no mesh has the "
        "axes of both",
        'make one mesh with names, mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp")), shard the '
        'parameters over mesh["tp"], and pass mesh["dp"] to fully_shard',
    )


def mesh_without(data: DataAxes, mesh_info: MeshInfo) -> MeshInfo | None:
    """Return the slice of a mesh without the data axes, or None if it has no other axes."""
    data_axes = data.inside(mesh_info) or ()
    others = tuple(name for axis, name in enumerate(mesh_info.names) if axis not in data_axes)
    if others == mesh_info.names:
        return mesh_info
    return adopt(root_mesh(mesh_info.mesh)[others]) if others else None
