"""One parameter under `fully_shard`: what modules have between steps, and what they compute with.

| | what it is |
|---|---|
| `sharded` | the parameter of optimizers and checkpoints: a DTensor, `Shard(0)` over the data axis |
| `leaves` | the gathered parameter, to which gradients arrive: a local tensor or a DTensor, as the inputs are |

The memory of the gathered parameter is freed after use, and filled again before the next.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..nn.replaced import copy_attributes, record_replacement
from ..sharding.mesh import MeshInfo
from ..sharding.placement import InterleavedShard, Partial, Placement, Replicate, Shard, ShardOrderEntry
from ..sharding.spec import DTensorSpec, TensorMeta
from ..tensor.dtensor import DTensor
from ..tensor.leaf_gradient import leaf_without_reduction
from .axes import DataAxes, joined_mesh, mesh_without
from .memory import Piece, Shape
from .ranks import coordinate_of, on_each_rank

Owner = tuple[nn.Module, str]


@dataclass(eq=False)
class ShardedParameter:
    """A parameter of a group, by all the names under which modules own it."""

    name: str
    owners: list[Owner]
    axes: DataAxes
    dim: int
    spec: DTensorSpec
    """The spec of the sharded parameter."""
    over_others: DTensorSpec | None
    """The spec of the gathered parameter over the axes other than those of data parallel; None for a plain tensor."""
    sharded: nn.Parameter
    data: Tensor | None = None
    """The gathered parameter: a local tensor in the gathered buffer."""
    leaves: dict[MeshInfo | None, Tensor] = field(default_factory=dict)
    """The gathered parameter as modules see it, by the mesh over which their inputs are distributed."""
    local: Tensor | None = None
    """The local shard of `sharded`, as it was put into the flat buffer."""
    accumulated: Tensor | None = None
    """Gradients of the gathered parameter that were added up in another dtype and are not reduced yet."""

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedParameter:
        """A copy without memory: its group puts it into buffers of its own."""
        owners = [(copy.deepcopy(module, memo), name) for module, name in self.owners]
        sharded = copy.deepcopy(self.sharded, memo)
        return ShardedParameter(self.name, owners, self.axes, self.dim, self.spec, self.over_others, sharded)

    # ---- sizes --------------------------------------------------------------------------------------------------

    def shape_at(self, rank: int | None) -> Shape:
        """The shape of the gathered parameter on a rank, with the sharded dim first."""
        other = self.over_others
        shape = self.spec.shape if other is None else other.local_shape(coordinate_of(other.mesh_info, rank))
        return (shape[self.dim], *shape[: self.dim], *shape[self.dim + 1 :])

    def index_at(self, rank: int | None) -> int:
        """The index of a rank among the ranks that share this parameter."""
        return coordinate_of(self.axes.mesh_info, rank)[self.axes.shard_axis]

    # ---- memory -------------------------------------------------------------------------------------------------

    def shard_in(self, flat: Tensor, piece: Piece, rank: int | None) -> Tensor:
        """The local shard in the flat buffer of a rank."""
        rows = piece.held(self.index_at(rank))
        part = flat[piece.start : piece.start + rows * piece.width]
        return part.view(rows, *piece.shape[1:]).movedim(0, self.dim)

    def gathered_in(self, buffer: Tensor, piece: Piece) -> Tensor:
        """The gathered parameter in the gathered buffer of a rank."""
        numel = piece.shape[0] * piece.width
        return buffer[piece.gathered_start : piece.gathered_start + numel].view(piece.shape).movedim(0, self.dim)

    # ---- what the module sees -----------------------------------------------------------------------------------

    def gathered(self, inputs: MeshInfo | None) -> Tensor:
        """The gathered parameter for a module whose inputs are distributed over a mesh, or, with None, are not.

        It is made once: whenever the gathered buffer has its memory, it has the values of the parameter.
        """
        found = self.leaves.get(inputs)
        if found is None:
            found = self.leaves[inputs] = self._make_leaf(inputs)
        if found.requires_grad != self.sharded.requires_grad:
            found.requires_grad_(self.sharded.requires_grad)
        return found

    def _make_leaf(self, inputs: MeshInfo | None) -> Tensor:
        assert self.data is not None
        if inputs is None and self.over_others is None:
            return nn.Parameter(self.data, self.sharded.requires_grad)
        spec, gradient = self._specs_for(inputs)
        leaf = DTensor.wrap(self.data.detach(), spec)
        return leaf_without_reduction(leaf, gradient)

    def _specs_for(self, inputs: MeshInfo | None) -> tuple[DTensorSpec, DTensorSpec]:
        """The specs of the gathered parameter and of its gradient, which is summed over the data axes afterwards."""
        other = self.over_others
        if inputs is None:
            assert other is not None
            spec = other.with_dtype(self._dtype())
            return spec, spec.cotangent()
        if other is not None and not set(other.mesh_info.names) <= set(inputs.names):
            inputs = self.spec.mesh_info  # inputs that are local with respect to the axes of a style
        summed = self.axes.inside(inputs)
        assert summed is not None
        placements: list[Placement] = [Replicate()] * len(inputs.sizes)
        order: tuple[ShardOrderEntry, ...] = ()
        if self.over_others is not None:
            placements, order = _on_mesh(self.over_others, inputs)
        meta = self.spec.tensor_meta._replace(dtype=self._dtype())
        spec = DTensorSpec(inputs.mesh, placements, meta, order)
        partial: list[Placement] = [Partial() if axis in summed else p for axis, p in enumerate(placements)]
        return spec, DTensorSpec(inputs.mesh, partial, meta, order)

    def set_gathered(self, data: Tensor) -> None:
        """Have this local tensor, in the gathered buffer, as the gathered parameter."""
        self.data = data
        self.leaves.clear()

    # ---- gradients ----------------------------------------------------------------------------------------------

    def has_gradient(self) -> bool:
        """Whether a gradient has arrived that is not reduced yet."""
        return self.accumulated is not None or any(leaf.grad is not None for leaf in self.leaves.values())

    def add_missing_gradient(self) -> None:
        """Have zeros for a gradient if none has arrived."""
        if self.sharded.requires_grad and self.data is not None and not self.has_gradient():
            self.accumulated = on_each_rank(lambda rank, data: torch.zeros_like(data), self.data)

    def take_gradient(self) -> Tensor:
        """The local gradient of the gathered parameter, which then has none."""
        found, self.accumulated = self.accumulated, None
        for leaf in self.leaves.values():
            if leaf.grad is not None:
                gradient = leaf.grad._local_tensor if isinstance(leaf.grad, DTensor) else leaf.grad
                leaf.grad = None
                found = gradient if found is None else found.add_(gradient)
        assert found is not None
        return found

    def accumulate_in(self, dtype: torch.dtype) -> None:
        """Add up gradients that are not reduced yet in the dtype in which they will be reduced."""
        if any(leaf.grad is not None and leaf.grad.dtype != dtype for leaf in self.leaves.values()):
            earlier, self.accumulated = self.accumulated, None
            gradient = self.take_gradient().to(dtype)
            self.accumulated = gradient if earlier is None else earlier.add_(gradient)

    def _dtype(self) -> torch.dtype:
        assert self.data is not None
        return self.data.dtype

    def put(self, tensor: Tensor) -> None:
        """Let every owner have this tensor as its parameter."""
        for module, name in self.owners:
            module._parameters[name] = tensor  # type: ignore[assignment]  # a DTensor of the leaf is no Parameter


def _on_mesh(spec: DTensorSpec, mesh_info: MeshInfo) -> tuple[list[Placement], tuple[ShardOrderEntry, ...]]:
    """Placements and order of a spec on a mesh that has the axes of its own, by name; replicated over the others."""
    names = spec.mesh_info.names
    placements: list[Placement] = [Replicate()] * len(mesh_info.sizes)
    for name, placement in zip(names, spec.placements, strict=True):
        placements[mesh_info.names.index(name)] = placement
    order = tuple(
        ShardOrderEntry(entry.tensor_dim, tuple(mesh_info.names.index(names[axis]) for axis in entry.mesh_dims))
        for entry in spec.shard_order
    )
    return placements, order


# ---- making one ------------------------------------------------------------------------------------------------------


def shard_parameter(
    name: str, parameter: nn.Parameter, owners: list[Owner], axes: DataAxes, dim: int
) -> tuple[ShardedParameter, Tensor]:
    """The sharded parameter in the place of a plain or distributed one, and the local tensor to take its data from.

    It has no memory yet: its group puts it into a flat buffer.
    """
    distributed = parameter if isinstance(parameter, DTensor) else None
    dim = _checked_dim(name, parameter, dim)
    if distributed is None:
        spec, other, local = _spec_of_plain(parameter, axes, dim), None, parameter.detach()
    else:
        spec, other = _spec_of_distributed(name, distributed._spec, axes, dim)
        local = distributed._local_tensor.detach()
    return ShardedParameter(name, owners, axes, dim, spec, other, parameter), local


def replace_by(parameter: ShardedParameter, local: Tensor) -> None:
    """Make the distributed tensor with this local shard the parameter that the owners have."""
    old = parameter.sharded
    new = nn.Parameter(DTensor.wrap(local, parameter.spec), old.requires_grad)
    if isinstance(old, DTensor):
        new.__dict__.update({key: value for key, value in old.__dict__.items() if key != "_leaf_gradient"})
    else:
        copy_attributes(old, new)  # type: ignore[arg-type]
        record_replacement(old, new)  # type: ignore[arg-type]
    parameter.sharded = new
    parameter.local = shard_of(new)
    parameter.put(new)


def shard_of(tensor: Any) -> Tensor:
    """The local shard of a distributed tensor, the object that it holds."""
    return tensor._local_tensor


def _checked_dim(name: str, parameter: Tensor, dim: int) -> int:
    if not parameter.dim():
        raise InputError(
            f"fully_shard got the parameter {name!r}, which has no dims to shard",
            f"make it a tensor of one element, or pass ignored_params={{module.{name}}}",
        )
    if not -parameter.dim() <= dim < parameter.dim():
        raise InputError(
            f"Shard({dim}) for the parameter {name!r} of shape {list(parameter.shape)}",
            f"shard_placement_fn returns one of its dims, 0 to {parameter.dim() - 1}",
        )
    return dim % parameter.dim()


def _first_dim_strides(shape: torch.Size, dim: int) -> tuple[int, ...]:
    """The strides of a tensor that lies in memory with one dim first, and the others as they come."""
    order = [dim, *(d for d in range(len(shape)) if d != dim)]
    strides, step = [0] * len(shape), 1
    for d in reversed(order):
        strides[d] = step
        step *= max(shape[d], 1)
    return tuple(strides)


def _spec_of_plain(parameter: Tensor, axes: DataAxes, dim: int) -> DTensorSpec:
    placements: list[Placement] = [Replicate()] * axes.shard_axis + [Shard(dim)]
    shape = parameter.shape
    return DTensorSpec(
        axes.mesh_info.mesh, placements, TensorMeta(shape, _first_dim_strides(shape, dim), parameter.dtype)
    )


def _spec_of_distributed(
    name: str, old: DTensorSpec, axes: DataAxes, dim: int
) -> tuple[DTensorSpec, DTensorSpec | None]:
    """The spec of a distributed parameter that is also sharded over the data axis, and the one without that axis."""
    mesh_info = joined_mesh(axes, old.mesh_info)
    placements, order = _on_mesh(old, mesh_info)
    data = [mesh_info.names.index(name) for name in axes.mesh_info.names]
    for axis in data:
        if not isinstance(placements[axis], Replicate):
            raise InputError(
                f"fully_shard over {axes.mesh_info!r} got the parameter {name!r} as {old!r}, which "
                f"{mesh_info.names[axis]} distributes already",
                "pass a mesh over whose axes parameters are replicated",
            )
    if any(isinstance(p, InterleavedShard) and p.dim == dim for p in placements):
        raise InputError(
            f"the parameter {name!r} is {old!r}, sharded in blocks along dim {dim}, where fully_shard would shard it",
            "let shard_placement_fn return another dim for it, or keep its blocks as parameters of their own",
        )
    meta = TensorMeta(old.shape, _first_dim_strides(old.shape, dim), old.dtype)
    shard_axis = data[-1]
    placements[shard_axis] = Shard(dim)
    inner = {entry.tensor_dim: entry.mesh_dims for entry in order}
    inner[dim] = (*inner.get(dim, ()), shard_axis)
    new_order = tuple(ShardOrderEntry(d, inner[d]) for d in sorted(inner))
    spec = DTensorSpec(mesh_info.mesh, placements, meta, new_order)
    return spec, _without_data_axes(old, axes, meta)


def _without_data_axes(old: DTensorSpec, axes: DataAxes, meta: TensorMeta) -> DTensorSpec | None:
    others = mesh_without(axes, old.mesh_info)
    if others is None:
        return None
    names = old.mesh_info.names
    placements = [p for name, p in zip(names, old.placements, strict=True) if name in others.names]
    order = tuple(
        ShardOrderEntry(entry.tensor_dim, tuple(others.names.index(names[axis]) for axis in entry.mesh_dims))
        for entry in old.shard_order
    )
    return DTensorSpec(others.mesh, placements, meta, order)


def shard_data(parameter: ShardedParameter, piece_at: Any, local: Tensor, flat: Tensor) -> None:
    """Copy this rank's rows of a parameter, given as a local tensor with all rows, into the flat buffer."""

    def copy(rank: int | None, flat: Tensor, local: Tensor) -> None:
        piece = piece_at(rank)
        first = parameter.index_at(rank) * piece.rows
        rows = local.movedim(parameter.dim, 0)[first : first + piece.rows]
        parameter.shard_in(flat, piece, rank).copy_(rows.movedim(0, parameter.dim))

    on_each_rank(copy, flat, local)
