"""One parameter under `fully_shard`: sharded between steps, gathered while modules compute.

| field | what it is |
|---|---|
| `sharded` | the parameter of optimizers and checkpoints: a DTensor, `Shard(0)` over the data axis |
| `leaves` | the gathered parameter, which gets the gradients: a local tensor or a DTensor, as the inputs are |

The memory of the gathered parameter is freed after each use, and allocated and filled again before the next.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .._torch.modules import parameters_of
from ..comm.on_ranks import shard_outside
from ..sharding.mesh import MeshInfo
from ..sharding.placement import Partial, Placement, Replicate, ShardOrderEntry
from ..sharding.spec import DTensorSpec
from ..tensor.dtensor import DTensor
from ..tensor.leaf_gradient import leaf_without_reduction
from .axes import DataAxes
from .memory import Piece, Shape, View, view_of
from .ranks import coordinate_of, on_each_rank
from .specs import placements_on

Owner = tuple[nn.Module, str]


@dataclass(eq=False)
class ShardedParameter:
    """A parameter of a group, with the modules that own it and its names in them."""

    name: str
    owners: list[Owner]
    axes: DataAxes
    dim: int
    spec: DTensorSpec
    """The spec of the sharded parameter."""
    over_others: DTensorSpec | None
    """The spec of the gathered parameter on the axes that are not data parallel; None for a plain tensor."""
    sharded: nn.Parameter
    data: Tensor | None = None
    """The gathered parameter: a local tensor in the gathered buffer."""
    leaves: dict[MeshInfo | None, Tensor] = field(default_factory=dict)
    """The gathered parameter as modules see it, by the mesh over which their inputs are distributed."""
    local: Tensor | None = None
    """The local shard of `sharded`, as it was put into the flat buffer."""
    accumulated: Tensor | None = None
    """Gradients of the gathered parameter that were added up in another dtype and are not reduced yet."""

    def __deepcopy__(self, memo: dict[int, object]) -> ShardedParameter:
        """Return a copy without gathered data: the copy's group puts the local shard into its own buffers."""
        owners = [(copy.deepcopy(module, memo), name) for module, name in self.owners]
        sharded = copy.deepcopy(self.sharded, memo)
        return ShardedParameter(self.name, owners, self.axes, self.dim, self.spec, self.over_others, sharded)

    # ---- sizes --------------------------------------------------------------------------------------------------

    def shape_at(self, rank: int | None) -> Shape:
        """Return the shape of the gathered parameter on a rank, with the sharded dim first."""
        other = self.over_others
        shape = self.spec.shape if other is None else other.local_shape(coordinate_of(other.mesh_info, rank))
        return (shape[self.dim], *shape[: self.dim], *shape[self.dim + 1 :])

    def index_at(self, rank: int | None) -> int:
        """Return the index of a rank along the axis that shards this parameter."""
        return coordinate_of(self.axes.mesh_info, rank)[self.axes.shard_axis]

    # ---- memory -------------------------------------------------------------------------------------------------

    def shard_view(self, piece: Piece, rank: int | None) -> View:
        """Return the local shard as a view of the flat buffer of a rank."""
        return view_of((piece.held(self.index_at(rank)), *piece.shape[1:]), self.dim, piece.start)

    def gathered_in(self, buffer: Tensor, piece: Piece) -> Tensor:
        """Return the gathered parameter as a view of the gathered buffer of a rank."""
        return buffer.as_strided(*view_of(piece.shape, self.dim, piece.gathered_start))

    # ---- what the module sees -----------------------------------------------------------------------------------

    def gathered(self, inputs: MeshInfo | None) -> Tensor:
        """Return the gathered parameter for inputs that are distributed over a mesh, or, with None, for local inputs.

        It is created once, and valid whenever the gathered buffer is allocated and filled.
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
        """Return the specs of the gathered parameter and of its gradient, which is reduced over the data axes later."""
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
            placements, order = placements_on(self.over_others, inputs)
        meta = self.spec.tensor_meta._replace(dtype=self._dtype())
        spec = DTensorSpec(inputs.mesh, placements, meta, order)
        partial: list[Placement] = [Partial() if axis in summed else p for axis, p in enumerate(placements)]
        return spec, DTensorSpec(inputs.mesh, partial, meta, order)

    def set_gathered(self, data: Tensor) -> None:
        """Use this local tensor, a view of the gathered buffer, as the gathered parameter."""
        self.data = data
        self.leaves.clear()

    def hold_nothing(self, dtype: torch.dtype, device: torch.device) -> None:
        """Set an empty gathered parameter, on a rank outside the mesh, which runs the same program."""
        self.set_gathered(shard_outside(self.spec.ndim, dtype, device))

    def drop_gradient(self) -> None:
        """Replace the gradient by an empty one, on a rank outside the mesh."""
        if self.has_gradient():
            local = self.take_gradient().to(shard_of(self.sharded))
            self.sharded.grad = DTensor.wrap(local, self.spec)

    # ---- gradients ----------------------------------------------------------------------------------------------

    def has_gradient(self) -> bool:
        """Return whether there is a gradient that is not reduced yet."""
        return self.accumulated is not None or any(leaf.grad is not None for leaf in self.leaves.values())

    def add_missing_gradient(self) -> None:
        """Set the gradient to zeros if there is none."""
        if self.sharded.requires_grad and self.data is not None and not self.has_gradient():
            self.accumulated = on_each_rank(lambda rank, data: torch.zeros_like(data), self.data)

    def take_gradient(self) -> Tensor:
        """Return the local gradient of the gathered parameter, and clear it."""
        found, self.accumulated = self.accumulated, None
        for leaf in self.leaves.values():
            if leaf.grad is not None:
                gradient = leaf.grad._local_shard if isinstance(leaf.grad, DTensor) else leaf.grad
                leaf.grad = None
                found = gradient if found is None else found.add_(gradient)
        assert found is not None
        return found

    def accumulate_in(self, dtype: torch.dtype) -> None:
        """Accumulate gradients that are not reduced yet in the dtype of the reduction."""
        if any(leaf.grad is not None and leaf.grad.dtype != dtype for leaf in self.leaves.values()):
            earlier, self.accumulated = self.accumulated, None
            gradient = self.take_gradient().to(dtype)
            self.accumulated = gradient if earlier is None else earlier.add_(gradient)

    def _dtype(self) -> torch.dtype:
        assert self.data is not None
        return self.data.dtype

    def put(self, tensor: Tensor) -> None:
        """Set this tensor as the parameter of every module that owns it."""
        for module, name in self.owners:
            parameters_of(module)[name] = tensor  # type: ignore[assignment]  # a DTensor of the leaf is no Parameter


def shard_of(tensor: Any) -> Tensor:
    """Return the local shard of a distributed tensor, without a copy."""
    return tensor._local_shard
