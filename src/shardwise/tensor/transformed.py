"""`from_local` under the transforms of `torch.func`.

A transform puts a tensor into a wrapper, which is a plain tensor to Python. PyTorch unwraps it for an autograd function
that defines its derivative (`backward`, `jvp`), and how it treats a batch of inputs (`vmap`).

>>> torch.func.grad(lambda local: DTensor.from_local(local, mesh, [Shard(0)]).square().sum())(local)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .._torch.transforms import innermost, is_wrapped, outside_transforms
from ..errors import InputError
from ..sharding.base import DTensorBase
from ..sharding.mesh import mesh_info_of
from ..sharding.placement import AnyShard, InterleavedShard, Placement, Placements, Shard
from ..sharding.spec import DTensorSpec, normalize_placements
from .autograd import as_distributed_gradient, grad_spec_of_local, to_spec

Options = dict[str, Any]
"""The named arguments of `from_local`."""


def from_local_transformed(local: Tensor, mesh: DeviceMesh, options: Options) -> Any:
    """Return `from_local` while a transform is active: a distributed tensor in the wrappers of the local one."""
    if is_wrapped(local):
        return _FromLocal.apply(local, mesh, options)
    with outside_transforms():
        return DTensorBase.concrete.from_local(local, mesh, **options)  # type: ignore[attr-defined]


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(local: Tensor, mesh: DeviceMesh, options: Options) -> DTensorBase:
        made: DTensorBase = DTensorBase.concrete.from_local(local, mesh, **options)  # type: ignore[attr-defined]
        return made

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, DeviceMesh, Options], output: Tensor) -> None:
        made = innermost(output)
        assert isinstance(made, DTensorBase)
        ctx.given = inputs[1:]
        ctx.grad_spec = grad_spec_of_local(made._spec, inputs[2].get("grad_placements"))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _ToLocal.apply(grad, ctx.grad_spec), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: object) -> Tensor:
        return from_local_transformed(tangent, *ctx.given)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int, None, None], local: Tensor, mesh: DeviceMesh, options: Options
    ) -> tuple[Tensor, int]:
        batched = local.movedim(in_dims[0], 0)
        changed = dict(options)
        for name in ("placements", "grad_placements"):
            if options.get(name) is not None:
                changed[name] = _behind_batch(options[name], mesh, local.dim() - 1)
        if options.get("shape") is not None:
            changed["shape"], changed["stride"] = (info.batch_size, *options["shape"]), None
        return _FromLocal.apply(batched, mesh, changed), 0


class _ToLocal(torch.autograd.Function):
    """From the gradient of a distributed tensor to that of the local one."""

    @staticmethod
    def forward(grad: Tensor, spec: DTensorSpec) -> Tensor:
        distributed = as_distributed_gradient(grad, spec)
        local: Tensor = to_spec(distributed, spec.with_dtype(grad.dtype)).to_local()
        return local

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, DTensorSpec], output: Tensor) -> None:
        ctx.spec = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        spec = ctx.spec.cotangent()
        options = {"placements": spec.placements, "shape": tuple(spec.shape)}
        return from_local_transformed(grad, spec.mesh, options), None


def _behind_batch(placements: Placements, mesh: DeviceMesh, ndim: int) -> tuple[Placement, ...]:
    """Return the placements of a batch, along a new first dim, of tensors of `ndim` dims with these placements."""
    normal, order = normalize_placements(mesh_info_of(mesh), placements, ndim)
    if any(list(entry.mesh_dims) != sorted(entry.mesh_dims) for entry in order):
        raise InputError(
            f"from_local under vmap with {placements!r}: axes shard a dim in another order than that of the mesh",
            "call from_local outside of vmap",
        )
    return tuple(_shifted(placement) if isinstance(placement, AnyShard) else placement for placement in normal)


def _shifted(placement: AnyShard) -> AnyShard:
    if isinstance(placement, InterleavedShard):
        return InterleavedShard(placement.dim + 1, placement.blocks)
    return Shard(placement.dim + 1)
