"""The mesh axis that a style acts on. On the other axes of the mesh a tensor keeps its placements.

On a mesh (dp, tp) a style's `Shard(-1)` shards the last dim over tp and leaves dp alone. Parameters are replicated over
dp. A tensor that is local with respect to tp is still distributed over dp: it is a DTensor on the mesh (dp).
"""

from __future__ import annotations

from functools import cached_property

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..comm.groups import adopt
from ..dispatch.modes import modes
from ..errors import InputError, MeshError
from ..sharding.mesh import MeshInfo, mesh_info_of
from ..sharding.placement import AnyShard, InterleavedShard, Partial, Placement, Replicate
from ..tensor.dtensor import DTensor

DEFAULT_AXIS = "tp"


class StyleAxis:
    """One axis of a mesh, with `from_local` and `to_local` for this axis alone. The mesh may have no other axis."""

    def __init__(self, mesh: DeviceMesh, name: str | None = None) -> None:
        self.mesh = mesh
        self.mesh_info = adopt(mesh)
        self.index = _index(self.mesh_info, name)
        self.size = self.mesh_info.sizes[self.index]
        self.name = self.mesh_info.names[self.index]
        self.is_only_axis = len(self.mesh_info.sizes) == 1

    @cached_property
    def other_axes(self) -> DeviceMesh:
        """The mesh of the other axes."""
        names = tuple(name for axis, name in enumerate(self.mesh_info.names) if axis != self.index)
        if self.mesh.mesh_dim_names is None:
            raise MeshError(f"the axes of {self.mesh_info!r} have no names", "give mesh_dim_names to init_device_mesh")
        return self.mesh[names]

    @cached_property
    def _other_axes_info(self) -> MeshInfo:
        return mesh_info_of(self.other_axes)

    def parameter_placements(self, placement: Placement) -> tuple[Placement, ...]:
        """Return the placements of a parameter: this one on the axis, replicated over the others."""
        return tuple(placement if axis == self.index else Replicate() for axis in range(len(self.mesh_info.sizes)))

    def placements_with(self, tensor: DTensor, placement: Placement) -> tuple[Placement, ...]:
        """Return the tensor's placements with this one on the axis."""
        if self.is_only_axis:
            return (placement,)
        return tuple(placement if axis == self.index else p for axis, p in enumerate(tensor.placements))

    def from_local(self, tensor: Tensor, placement: Placement, shape: tuple[int, ...] | None = None) -> DTensor:
        """Return the DTensor on the full mesh whose local tensor along this axis is `tensor`.

        `tensor` is plain, or distributed over the other axes if there are any. Inside `implicit_replication` a plain
        tensor counts as replicated over the other axes.
        """
        if self.is_only_axis:
            return DTensor.from_local(tensor, self.mesh, (placement,), shape=shape)
        if not isinstance(tensor, DTensor) and modes.implicit_replication:
            return DTensor.from_local(tensor, self.mesh, self.parameter_placements(placement), shape=shape)
        if not isinstance(tensor, DTensor):
            raise InputError(
                f"the module got a plain tensor of shape {list(tensor.shape)} on {self.mesh_info!r}: its style gives "
                f"the placement on {self.name}, but the placements on the other axes are not known",
                "distribute the model's inputs over the mesh, e.g. distribute_tensor(x, mesh, P('dp')), or treat them "
                "as replicated inside `with shardwise.experimental.implicit_replication():`",
            )
        rest = tensor.placements
        placements = (*rest[: self.index], placement, *rest[self.index :])
        global_shape = [
            size * self.size if isinstance(placement, AnyShard) and dim == placement.dim % tensor.dim() else size
            for dim, size in enumerate(tensor.shape)
        ]
        return DTensor.from_local(tensor.to_local(), self.mesh, placements, shape=shape or global_shape)

    def to_local(self, tensor: DTensor, grad: Placement | None = None) -> Tensor:
        """Return the local tensor along this axis: plain, or distributed over the other axes if there are any.

        `grad` is the placement on this axis of the gradients of the local tensors, if not that of the tensor.
        """
        if self.is_only_axis:
            return tensor.to_local(grad_placements=None if grad is None else (grad,))
        placement = tensor.placements[self.index]
        rest = tuple(p for axis, p in enumerate(tensor.placements) if axis != self.index)
        shape = list(tensor.shape)
        if isinstance(placement, AnyShard):
            blocks = placement.blocks if isinstance(placement, InterleavedShard) else 1
            if shape[placement.dim] % (self.size * blocks):
                raise InputError(
                    f"{tensor._spec!r} has no local tensor over {self.name}: the {self.size} shards of dim "
                    f"{placement.dim}, of size {shape[placement.dim]}, differ in size, and a DTensor on the other "
                    "axes has one shape",
                    "keep outputs distributed: use_local_output=False",
                )
            shape[placement.dim] //= self.size
        of_gradient = None
        if grad is not None:
            kept = [Replicate() if isinstance(p, Partial) else p for p in tensor.placements]
            of_gradient = (*kept[: self.index], grad, *kept[self.index + 1 :])
        local = tensor.to_local(grad_placements=of_gradient)
        return DTensor.from_local(local, self.other_axes, rest, shape=shape)

    def is_local(self, tensor: DTensor) -> bool:
        """Return whether a tensor is on the mesh of the other axes: local with respect to this one."""
        return not self.is_only_axis and tensor._spec.mesh_info is self._other_axes_info


def _index(mesh_info: MeshInfo, name: str | None) -> int:
    if name is not None:
        return mesh_info.axis_index(name)
    if len(mesh_info.sizes) == 1:
        return 0
    if DEFAULT_AXIS in mesh_info.names:
        return mesh_info.names.index(DEFAULT_AXIS)
    raise MeshError(
        f"a style acts on the axis {DEFAULT_AXIS!r}, and {mesh_info!r} has none of that name",
        f"slice the mesh, e.g. mesh[{mesh_info.names[-1]!r}], or name the axis: style.over({mesh_info.names[-1]!r})",
    )
