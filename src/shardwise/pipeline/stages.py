"""The mesh of each pipeline stage: the ranks at one index of the pipeline's axis."""

from __future__ import annotations

import torch.distributed as dist

from .._torch.device_mesh import MeshOfOthers
from ..comm.groups import adopt
from ..errors import MeshError
from ..sharding.mesh import DeviceMesh
from ..world import current_world

__all__ = ["stage_meshes"]


def stage_meshes(mesh: DeviceMesh, axis: str = "pp") -> list[DeviceMesh]:
    """Return the mesh of each stage: the other axes of `mesh`, at each index of `axis`.

    >>> mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    >>> [stage.mesh.tolist() for stage in stage_meshes(mesh)]
    [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]

    All ranks call it. On a process, the mesh of its own stage is `mesh["dp", "tp"]`; it is in none of the other meshes,
    and holds no data of tensors on them.
    """
    info = adopt(mesh)  # here, where all ranks do: the stages use its process groups
    index = info.axis_index(axis)
    names = tuple(name for name in info.names if name != axis)
    if not names or mesh.mesh_dim_names is None:
        raise MeshError(
            f"the stages of a pipeline over {axis!r} of {info!r} have no mesh: it has no other axes, or no names",
            'add an axis of size 1: init_device_mesh("cpu", (4, 1), mesh_dim_names=("pp", "tp"))',
        )
    if info.instances.shape[0] > 1:
        raise MeshError(
            f"stage_meshes got {info!r}, a submesh, whose stages would not cover the mesh it was sliced from",
            "pass the mesh that it was sliced from",
        )
    ranks = info.instances[0]
    others = [MeshOfOthers(mesh.device_type, ranks.select(index, i)[None], names) for i in range(ranks.shape[index])]
    here = dist.get_rank()
    own = current_world() is None
    return [mesh[names] if own and here in stage.mesh else stage for stage in others]
