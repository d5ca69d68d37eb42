"""Autograd functions: redistribution, and the conversions between local and distributed tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._torch.autograd import QuickFunction
from .._torch.backward_pass import materialized
from .._torch.fake_tensors import is_fake
from .._torch.modes import count_modes
from .._torch.proxies import call_in_graph
from ..comm.redistribute import redistribute_local, start_redistribute
from ..dispatch.modes import modes
from ..dispatch.watch import mark_exposed
from ..errors import InputError, MixedTensorError
from ..sharding.base import DTensorBase
from ..sharding.memory_order import in_memory_order
from ..sharding.placement import Placements
from ..sharding.recording import recorded
from ..sharding.spec import DTensorSpec, contiguous_meta
from .exported import Redistribution, exporting
from .from_local import on_mesh
from .handed_out import exposed, hand_out_new
from .sources import pending

# ---- redistribution -----------------------------------------------------------------------------------------------


def to_spec(
    tensor: DTensorBase,
    target: DTensorSpec,
    async_op: bool = False,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
) -> Any:
    """Return a tensor redistributed to another spec, on its mesh or another one. Differentiable."""
    if exporting() and target._placements is not None:
        return _redistribution(tensor, target, forward_dtype, backward_dtype)
    return _to_spec(tensor, target, async_op, forward_dtype, backward_dtype)


def _to_spec(
    tensor: DTensorBase,
    target: DTensorSpec,
    async_op: bool,
    forward_dtype: torch.dtype | None,
    backward_dtype: torch.dtype | None,
) -> Any:
    if torch.is_grad_enabled() and tensor.requires_grad:
        return Redistribute.apply(tensor, target, async_op, forward_dtype, backward_dtype)
    return _redistributed(tensor, target, async_op, forward_dtype)


_redistribution = Redistribution(_to_spec)


class MoveInGraph:
    """A redistribution as one node of a graph on distributed tensors, which may be run with other sizes."""

    def __init__(self, source: DTensorSpec, target: DTensorSpec, dtype: torch.dtype | None) -> None:
        self.placements, self.order, self.dtype = target.placements, target.shard_order, dtype
        self.other_mesh = None if target.mesh_info is source.mesh_info else target.mesh
        self.__name__, self.__module__ = "redistribute", __name__

    def __call__(self, tensor: DTensorBase) -> DTensorBase:
        """Redistribute a tensor."""
        meta = contiguous_meta(tensor._spec.shape, tensor._spec.dtype)
        mesh = tensor._spec.mesh if self.other_mesh is None else self.other_mesh
        target = DTensorSpec(mesh, self.placements, meta, self.order)
        return _redistributed(tensor, target, False, self.dtype)


def _redistributed(tensor: DTensorBase, target: DTensorSpec, async_op: bool, dtype: torch.dtype | None) -> DTensorBase:
    if count_modes() and target._placements is not None:
        made = call_in_graph(MoveInGraph(tensor._spec, target, dtype), tensor)
        if made is not NotImplemented:
            return made
    local, source = tensor._local_shard, tensor._spec
    if dtype is not None and dtype != source.dtype:
        local = local.to(dtype)
        source, target = source.with_dtype(dtype), target.with_dtype(dtype)
    if async_op:
        return pending(start_redistribute(local, source, target), local.device, target)
    moved = redistribute_local(local, source, target)
    if moved is local and source.tensor_meta != target.tensor_meta:
        target = target.with_meta(source.tensor_meta)  # data that did not move keeps its strides
    return DTensorBase.concrete.wrap(moved, target)


class Redistribute(QuickFunction):
    """Redistribute to another spec; the gradient is redistributed to the cotangent of the source."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: DTensorBase,
        target: DTensorSpec,
        async_op: bool,
        forward_dtype: torch.dtype | None,
        backward_dtype: torch.dtype | None,
    ) -> DTensorBase:
        """Redistribute."""
        ctx.source, ctx.backward_dtype, ctx.async_op = tensor._spec, backward_dtype, async_op
        return _redistributed(tensor, target, async_op, forward_dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[object, ...]:
        """Redistribute the gradient, in `backward_dtype` if there is one."""
        source: DTensorSpec = ctx.source.cotangent()
        distributed = as_distributed_gradient(grad, source)
        dtype, meta = ctx.backward_dtype or grad.dtype, distributed._spec.tensor_meta
        # It keeps its strides: on one device, where nothing moves, the gradient of a sum stays expanded.
        moved = to_spec(distributed, source.with_meta(meta), ctx.async_op, dtype)
        return moved if dtype is source.dtype else moved.to(source.dtype), None, None, None, None


def as_distributed_gradient(grad: Tensor, spec: DTensorSpec) -> DTensorBase:
    """Return a gradient as a DTensor. A plain one is accepted if it is zero, or inside `implicit_replication`.

    The derivative of a constant function is zero, and PyTorch's formulas may return plain zeros for it, of the global
    shape, on all ranks alike. Other plain gradients come from hooks or functions of the user, or from plain tensors
    into which distributed values were written.
    """
    if isinstance(grad, DTensorBase):
        return grad
    plain = materialized(grad.detach())
    if not modes.implicit_replication and not is_fake(plain):
        recorded(_require_zero, plain, spec)
    replicated = spec.with_dtype(grad.dtype).replicated(row_major=True)
    return DTensorBase.concrete.wrap(on_mesh(plain, spec.mesh_info), replicated)


def _require_zero(plain: Tensor, spec: DTensorSpec) -> None:
    """Raise an error unless a plain gradient is zero."""
    if bool(plain.any()):
        raise MixedTensorError(
            f"the gradient of {spec!r} is a plain tensor of shape {list(plain.shape)}",
            "return a DTensor from the hook or autograd function that made it: DTensor.from_local(...)",
        )


# ---- from and to local tensors --------------------------------------------------------------------------------------


class FromLocal(QuickFunction):
    """Wrap a local tensor. `data` is the tensor itself, its copy on the mesh's device, or a `RankTensor` of copies."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, data: Tensor, spec: DTensorSpec, grad_spec: DTensorSpec) -> DTensorBase:
        """Wrap the local tensor."""
        ctx.grad_spec, ctx.device = grad_spec, local.device
        return DTensorBase.concrete.wrap(data, spec)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Return the local shard of the gradient; None on a rank outside the mesh."""
        if ctx.grad_spec.mesh_info.outside:
            return None, None, None, None
        distributed = as_distributed_gradient(grad, ctx.grad_spec)
        local = exposed(to_spec(distributed, ctx.grad_spec.with_dtype(grad.dtype)))
        return local if local.device == ctx.device else local.to(ctx.device), None, None, None


def grad_spec_of_local(spec: DTensorSpec, grad_placements: Placements | None) -> DTensorSpec:
    """Return the spec of the gradient whose local shards are the gradients of the local tensors given to `from_local`.

    As in PyTorch, the local tensors of a Partial tensor get the gradient of the global tensor.
    """
    mesh_info = spec.mesh_info
    if grad_placements is None:
        for axis, op in spec.layout.partial:
            if op not in ("sum", "avg"):
                raise InputError(
                    f"from_local of {spec!r} with gradients: {op} over {mesh_info.names[axis]} depends on what other "
                    "ranks hold, which a local gradient does not see",
                    "reduce before from_local, pass grad_placements, or detach the local tensor",
                )
        return spec.cotangent()
    grad_spec = spec.with_placements(grad_placements)
    for at in mesh_info.coordinates if mesh_info.simulated else (mesh_info.coordinate,):
        if grad_spec.local_shape(at) != spec.local_shape(at):
            raise InputError(
                f"grad_placements {list(grad_spec.placements)} of {spec!r} give local gradients of shape "
                f"{list(grad_spec.local_shape(at))} for local tensors of shape {list(spec.local_shape(at))}",
                "a gradient has the shape of its tensor: shard the same dims",
            )
    return grad_spec


class ToLocal(QuickFunction):
    """Return the local shard; `grad_spec` is the spec of the gradient whose shards the local gradients are."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensorBase, grad_spec: DTensorSpec) -> Tensor:
        """Return the local shard."""
        ctx.grad_spec = grad_spec
        if count_modes():
            made = call_in_graph(hand_out_new, tensor)
            if made is not NotImplemented:
                return made
        return hand_out_new(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Wrap the local gradient."""
        spec: DTensorSpec = ctx.grad_spec.with_dtype(grad.dtype)
        if not spec.dense:
            spec = spec.with_meta(contiguous_meta(spec.shape, spec.dtype))
        # A local gradient may have any strides; views of it must be legal where they are for the global tensor.
        mesh_info = spec.mesh_info
        grad = in_memory_order(on_mesh(grad, mesh_info), None if mesh_info.outside else spec.memory_order)
        mark_exposed(grad)  # the program may hold it
        if torch.is_grad_enabled() and grad.requires_grad:
            return FromLocal.apply(grad, grad.detach(), spec, spec.cotangent()), None
        return DTensorBase.concrete.wrap(grad, spec), None
