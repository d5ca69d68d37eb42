"""The mesh axis that a style speaks of. The other axes of the mesh keep what they do to a tensor.

On a mesh (dp, tp) a style's `Shard(-1)` means: tp cuts the last dim, and dp does what it did before. Parameters are
replicated over dp. What is local to the style's axis is distributed over the others: dropping tp from a tensor on
(dp, tp) gives one on dp.
"""

from __future__ import annotations

from functools import cached_property

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..comm.groups import adopt
from ..errors import InputError, MeshError
from ..sharding.mesh import MeshInfo, mesh_info_of
from ..sharding.placement import Placement, Replicate, Shard
from ..tensor.dtensor import DTensor

DEFAULT_AXIS = "tp"


class StyleAxis:
    """One axis of a mesh."""

    def __init__(self, mesh: DeviceMesh, name: str | None = None) -> None:
        self.mesh = mesh
        self.mesh_info = adopt(mesh)
        self.index = _index(self.mesh_info, name)
        self.size = self.mesh_info.sizes[self.index]

    @property
    def alone(self) -> bool:
        """Whether the mesh has no other axis."""
        return len(self.mesh_info.sizes) == 1

    @cached_property
    def others(self) -> DeviceMesh:
        """The mesh of the other axes."""
        names = tuple(name for axis, name in enumerate(self.mesh_info.names) if axis != self.index)
        if self.mesh.mesh_dim_names is None:
            raise MeshError(f"the axes of {self.mesh_info!r} have no names", "give mesh_dim_names to init_device_mesh")
        return self.mesh[names]

    @cached_property
    def _others_view(self) -> MeshInfo:
        return mesh_info_of(self.others)

    def parameter(self, placement: Placement) -> tuple[Placement, ...]:
        """Placements of a parameter: replicated over the other axes."""
        return tuple(placement if axis == self.index else Replicate() for axis in range(len(self.mesh_info.sizes)))

    def placed(self, tensor: DTensor, placement: Placement) -> tuple[Placement, ...]:
        """The tensor's placements with this axis doing something else."""
        if self.alone:
            return (placement,)
        return tuple(placement if axis == self.index else p for axis, p in enumerate(tensor.placements))

    def attach(self, tensor: Tensor, placement: Placement, shape: tuple[int, ...] | None = None) -> DTensor:
        """The tensor of which this axis holds parts: the reverse of `detach`."""
        if self.alone:
            return DTensor.from_local(tensor, self.mesh, (placement,), shape=shape)
        if not isinstance(tensor, DTensor):
            raise InputError(
                f"a plain tensor of shape {list(tensor.shape)} on {self.mesh_info!r}: "
                f"only {self.mesh_info.names[self.index]} is spoken of, and how the other axes cut it is not known",
                "distribute the model's inputs over the mesh, e.g. distribute_tensor(x, mesh, P('dp'))",
            )
        rest = tensor.placements
        placements = (*rest[: self.index], placement, *rest[self.index :])
        whole = [
            size * self.size if isinstance(placement, Shard) and dim == placement.dim % tensor.dim() else size
            for dim, size in enumerate(tensor.shape)
        ]
        return DTensor.from_local(tensor.to_local(), self.mesh, placements, shape=shape or whole)

    def detach(self, tensor: DTensor) -> Tensor:
        """What this axis holds of a tensor: plain, or distributed over the other axes."""
        if self.alone:
            return tensor.to_local()
        mine = tensor.placements[self.index]
        rest = tuple(p for axis, p in enumerate(tensor.placements) if axis != self.index)
        part = list(tensor.shape)
        if isinstance(mine, Shard):
            if part[mine.dim] % self.size:
                raise InputError(
                    f"a local output of {tensor._spec!r}: parts over {self.mesh_info.names[self.index]} "
                    "differ in size, so they are no tensor on the other axes",
                    "keep outputs distributed: use_local_output=False",
                )
            part[mine.dim] //= self.size
        return DTensor.from_local(tensor.to_local(), self.others, rest, shape=part)

    def is_detached(self, tensor: DTensor) -> bool:
        """Whether a tensor is on the mesh of the other axes."""
        return not self.alone and tensor._spec.mesh_info is self._others_view


def _index(mesh_info: MeshInfo, name: str | None) -> int:
    if name is not None:
        return mesh_info.axis_index(name)
    if len(mesh_info.sizes) == 1:
        return 0
    if DEFAULT_AXIS in mesh_info.names:
        return mesh_info.names.index(DEFAULT_AXIS)
    raise MeshError(
        f"a style on {mesh_info!r}, none of whose axes is named {DEFAULT_AXIS!r}",
        f"slice the mesh, e.g. mesh[{mesh_info.names[-1]!r}], or name the axis: style.over({mesh_info.names[-1]!r})",
    )
