"""Pieces of parallel programs written by hand, for one rank's local tensors."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise import DTensor, Partial, Replicate, Shard


class SumForward(torch.autograd.Function):
    """All-reduce in forward, nothing in backward: behind a layer that computes parts of a sum."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class SumBackward(torch.autograd.Function):
    """Nothing in forward, all-reduce in backward: before a layer of which ranks compute some features."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


def shard_of(x: Tensor, dim: int, mesh, axis: str) -> Tensor:
    """This rank's shard, by its number."""
    rows = x.shape[dim] // mesh[axis].size()
    return x.narrow(dim, mesh.get_local_rank(axis) * rows, rows)


def keep_shard(module: nn.Module, name: str, dim: int, mesh, axis: str) -> None:
    """Replace a parameter by this rank's shard of it."""
    parameter = getattr(module, name)
    setattr(module, name, nn.Parameter(shard_of(parameter.detach(), dim, mesh, axis).clone()))


def scatter(x: Tensor, dim: int, mesh) -> Tensor:
    """From a replicated local tensor to this rank's shard, with gradients."""
    return DTensor.from_local(x, mesh, [Replicate()]).redistribute(placements=[Shard(dim)]).to_local()


def gather(x: Tensor, dim: int, mesh) -> Tensor:
    """From this rank's shard to the replicated tensor, with gradients."""
    return DTensor.from_local(x, mesh, [Shard(dim)]).redistribute(placements=[Replicate()]).to_local()


def gather_for_parts(x: Tensor, dim: int, mesh) -> Tensor:
    """As `gather`, for a use on each rank whose gradients are parts of a sum."""
    whole = DTensor.from_local(x, mesh, [Shard(dim)]).redistribute(placements=[Replicate()])
    return whole.to_local(grad_placements=[Partial()])


def scatter_sum(x: Tensor, dim: int, mesh) -> Tensor:
    """From parts of a sum to this rank's shard of the sum, with gradients."""
    return DTensor.from_local(x, mesh, [Partial()]).redistribute(placements=[Shard(dim)]).to_local()


def mean_over(gradients: list[Tensor], mesh, axis: str) -> None:
    """Average gradients of data-parallel ranks."""
    for gradient in gradients:
        dist.all_reduce(gradient, group=mesh.get_group(axis))
        gradient /= mesh[axis].size()


class MLP(nn.Module):
    def __init__(self, width: int = 4, hidden: int = 8, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden, bias)
        self.down = nn.Linear(hidden, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())
