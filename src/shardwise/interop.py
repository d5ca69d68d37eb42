"""Convert to and from PyTorch's own DTensor, without a copy.

>>> ours = from_torch(theirs)          # a shardwise.DTensor on the same mesh, in the same memory
>>> to_torch(ours)                     # and back

Gradients flow through both. PyTorch's DTensor is imported when one of these is called, not before.

    state = {name: from_torch(tensor) for name, tensor in their_module.state_dict().items()}
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ._torch.async_tensors import wait_for_data
from .comm.groups import adopt
from .errors import InputError, LayoutError
from .sharding.from_placements import in_mesh_order
from .sharding.placement import InterleavedShard, Partial, Placement, Shard, ShardOrder, as_placement
from .sharding.spec import DTensorSpec, TensorMeta
from .tensor.autograd import as_distributed_gradient, to_spec
from .tensor.dtensor import DTensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor as TorchDTensor
    from torch.distributed.tensor import Placement as TorchPlacement

__all__ = ["from_torch", "to_torch"]


def from_torch(dtensor: TorchDTensor) -> DTensor:
    """Return a DTensor of PyTorch as one of shardwise, on the same mesh and in the same memory. Differentiable.

    Raises for a Partial that only PyTorch has, and for strided shards of uneven sizes.

    >>> theirs = torch.distributed.tensor.distribute_tensor(torch.ones(4), mesh, [torch.distributed.tensor.Shard(0)])
    >>> from_torch(theirs).placements
    (Shard(dim=0),)
    """
    from torch.distributed.tensor import DTensor as TorchDTensor

    if not isinstance(dtensor, TorchDTensor):
        raise InputError(f"from_torch got a {type(dtensor).__name__}", "pass a torch.distributed.tensor.DTensor")
    return _FromTorch.apply(dtensor, _our_spec(dtensor))


def to_torch(dtensor: DTensor) -> TorchDTensor:
    """Return a DTensor of shardwise as one of PyTorch, on the same mesh and in the same memory. Differentiable.

    Raises for a layout that PyTorch's placements cannot express, and for tensors of a simulated world.

    >>> ours = shardwise.distribute_tensor(torch.ones(4), mesh, [shardwise.Shard(0)])
    >>> isinstance(to_torch(ours), torch.distributed.tensor.DTensor)
    True
    """
    if not isinstance(dtensor, DTensor):
        raise InputError(f"to_torch got a {type(dtensor).__name__}", "pass a shardwise.DTensor")
    return _ToTorch.apply(dtensor, _their_placements(dtensor.spec))


# A gradient takes the opposite conversion: the cotangent of Partial is Replicate in both libraries.


class _Context(Protocol):
    """The autograd context of a conversion."""

    spec: DTensorSpec


class _FromTorch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, theirs: TorchDTensor, spec: DTensorSpec) -> DTensor:
        ctx.spec = spec
        return DTensor(wait_for_data(theirs.to_local()), spec)

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[TorchDTensor, None]:
        return to_torch(_as_gradient(grad, ctx.spec)), None


class _ToTorch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, ours: DTensor, placements: list[TorchPlacement]) -> TorchDTensor:
        from torch.distributed.tensor import DTensor as TorchDTensor

        ctx.spec = ours.spec
        return TorchDTensor.from_local(
            ours.to_local(), ours.device_mesh, placements, run_check=False, shape=ours.shape, stride=ours.stride()
        )

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[DTensor, None]:
        from torch.distributed.tensor import DTensor as TorchDTensor

        return _as_gradient(from_torch(grad) if isinstance(grad, TorchDTensor) else grad, ctx.spec), None


def _as_gradient(grad: Tensor, spec: DTensorSpec) -> DTensor:
    """Return a gradient with the placements of the cotangent. A plain one is refused, as for any distributed tensor."""
    wanted = spec.cotangent()
    return to_spec(as_distributed_gradient(grad, wanted), wanted.with_dtype(grad.dtype))


# ---- placements ------------------------------------------------------------------------------------------------------


def _our_spec(theirs: TorchDTensor) -> DTensorSpec:
    mesh_info = adopt(theirs.device_mesh)
    if mesh_info.simulated:
        raise InputError(
            "from_torch in a simulated world: PyTorch's DTensor needs a process for each rank",
            "run the program under torchrun",
        )
    placements = [_ours(placement, theirs) for placement in theirs.placements]
    interleaved = any(isinstance(placement, InterleavedShard) for placement in placements)
    order: ShardOrder | None = None if interleaved else getattr(theirs._spec, "shard_order", None)
    meta = TensorMeta(theirs.shape, theirs.stride(), theirs.dtype)
    try:
        spec = DTensorSpec(theirs.device_mesh, placements, meta, order)
        uneven = interleaved and not spec.layout.is_even()
    except LayoutError:
        uneven = True
    if uneven:
        raise InputError(
            f"from_torch of {list(theirs.placements)} on shape {list(theirs.shape)}: strided shards of uneven sizes",
            "redistribute it to Shard or Replicate first",
        )
    held, expected = tuple(theirs.to_local().shape), spec.local_shape(mesh_info.coordinate)
    if held != expected:
        raise InputError(
            f"from_torch of {spec!r}: the local shard of this rank has shape {list(held)}, not {list(expected)}",
            "pass the right global shape and stride to PyTorch's DTensor.from_local",
        )
    return spec


def _ours(placement: TorchPlacement, theirs: TorchDTensor) -> Placement:
    found = as_placement(placement)
    if found is None:
        raise InputError(
            f"from_torch of {list(theirs.placements)}: {placement!r} has no counterpart in shardwise",
            "redistribute it to Shard or Replicate first",
        )
    return found


def _their_placements(spec: DTensorSpec) -> list[TorchPlacement]:
    from torch.distributed import tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    if spec.mesh_info.simulated:
        raise InputError(
            "to_torch in a simulated world: PyTorch's DTensor needs a process for each rank",
            "run the program under torchrun",
        )
    found: list[TorchPlacement] = []
    for placement in _in_their_order(spec):
        if isinstance(placement, Partial):
            found.append(tensor.Partial(placement.reduce_op))
        elif isinstance(placement, InterleavedShard):
            found.append(_StridedShard(placement.dim, split_factor=placement.blocks))
        elif isinstance(placement, Shard):
            found.append(tensor.Shard(placement.dim))
        else:
            found.append(tensor.Replicate())
    return found


def _in_their_order(spec: DTensorSpec) -> tuple[Placement, ...]:
    """Return the placements with which PyTorch, sharding in the order of the axes, gives this layout."""
    found = in_mesh_order(spec.layout)
    interleaved = any(isinstance(placement, InterleavedShard) for placement in found or ())
    if found is None or (interleaved and not spec.layout.is_even()):
        raise InputError(
            f"to_torch of {spec!r} on {spec.mesh_info!r}: PyTorch's placements cannot express this layout",
            "redistribute to placements that shard each dim evenly, in the order of the mesh's axes",
        )
    return found
