"""Flatten and unflatten a DTensor for the compiler: its local tensor, and a context without sizes.

`torch.compile` takes DTensors apart at the edge of a graph (`__tensor_flatten__`), records ops on local tensors and
collectives, and puts results together (`__tensor_unflatten__`). Between the two it keeps a `FlatContext`, and runs a
graph again only for tensors with an equal one. Guards of a graph can outlive the graph and its world
(`weakref.finalize` keeps them as long as any class that they mention), so the context refers to its mesh weakly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._torch.dynamo import break_graph
from .._torch.symbols import has_symbols, specialized, symbolic
from ..sharding.layout import Layout
from ..sharding.mesh import MeshInfo, MeshReference
from ..sharding.placement import AnyShard, Placement, ShardOrder
from ..sharding.spec import DTensorSpec, TensorMeta, contiguous_meta


class FlatContext(NamedTuple):
    """A spec without sizes and dtype; with the layout, sizes included, where no list of placements describes it."""

    mesh: MeshReference
    placements: tuple[Placement, ...] | None
    shard_order: ShardOrder
    layout: Layout | None
    requires_grad: bool

    @property
    def mesh_info(self) -> MeshInfo:
        """The mesh. Raises an error if its world has ended."""
        return self.mesh.get()

    def spec(self, shape: Sequence[int], stride: Sequence[int] | None, dtype: torch.dtype) -> DTensorSpec:
        """Return the spec with these sizes; row-major without strides. Graphs of simulated worlds have fixed sizes."""
        mesh_info = self.mesh_info
        sizes = specialized if mesh_info.simulated else symbolic
        meta = contiguous_meta(torch.Size(sizes(tuple(shape))), dtype)
        if stride is not None:
            meta = TensorMeta(meta.shape, sizes(tuple(stride)), dtype)
        if self.placements is None:
            assert self.layout is not None, "a context without placements has a layout"
            return DTensorSpec.from_layout(mesh_info, self.layout, meta)
        return DTensorSpec(mesh_info.mesh, self.placements, meta, self.shard_order)


class PyTorchContext(NamedTuple):
    """The context that Dynamo expects of `torch.distributed.tensor.DTensor`. The mesh is one of its inner objects."""

    placements: tuple[Placement, ...]
    tensor_meta: TensorMeta
    shard_order: ShardOrder
    requires_grad: bool


Context = FlatContext | PyTorchContext


class _Form:
    """Whether tensors are flattened as Dynamo expects of PyTorch's own class."""

    pytorch: bool = False


def use_form_of_pytorch(enabled: bool) -> None:
    """Set whether tensors are flattened as Dynamo expects of `torch.distributed.tensor.DTensor`."""
    _Form.pytorch = enabled


def flatten(spec: DTensorSpec, requires_grad: bool) -> tuple[list[str], Context]:
    """Return the names of the inner objects of a tensor, and its context."""
    if _Form.pytorch:
        if spec._placements is None:
            break_graph("a tensor whose sharding no list of placements describes")
        context = PyTorchContext(spec.placements, spec.tensor_meta, spec.shard_order, requires_grad)
        return ["_local_tensor", "device_mesh"], context
    return ["_local_tensor"], _flat_context(spec, requires_grad)


def context_on(mesh_info: MeshInfo | None, context: Context) -> FlatContext:
    """Return a context as a `FlatContext`; `mesh_info` is the mesh for a context in PyTorch's form."""
    if isinstance(context, FlatContext):
        return context
    assert mesh_info is not None, "in PyTorch's form the mesh is an inner object"
    return FlatContext(mesh_info.reference, context.placements, context.shard_order, None, context.requires_grad)


def relate_sizes(context: FlatContext, local: Tensor, shape: Sequence[int]) -> None:
    """Guard a graph with symbolic sizes: each global size is the local size times the number of shards.

    If shards are uneven, the graph is specialized to these sizes.
    """
    if not has_symbols((tuple(local.shape), tuple(shape))):
        return
    pieces = [1] * len(shape)
    for axis, placement in enumerate(context.placements or ()):
        if isinstance(placement, AnyShard):
            pieces[placement.dim] *= context.mesh_info.sizes[axis]
    for size, held, count in zip(shape, local.shape, pieces, strict=True):
        if size != held * count:
            specialized((size, held))


def _flat_context(spec: DTensorSpec, requires_grad: bool) -> FlatContext:
    placements = spec._placements
    layout = spec.layout if placements is None else None
    return FlatContext(spec.mesh_info.reference, placements, spec.shard_order, layout, requires_grad)
