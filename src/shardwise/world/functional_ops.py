"""The functional collectives, `torch.ops._c10d_functional`, on RankTensors. Each function is named after its op.

>>> with simulate(2):
...     x = RankTensor([torch.tensor([1.0]), torch.tensor([2.0])])
...     torch.ops._c10d_functional.all_reduce(x, "sum", dist.group.WORLD.group_name)
RankTensor(tensor([3.]), same on all 2 ranks)

Code that calls them therefore runs unchanged in a simulated world and in a world of processes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..errors import WorldError
from . import collectives
from .implementation import implements
from .rank_tensor import RankTensor, wrap
from .registry import Groups, current_world, groups_of

__all__ = ["parallel_groups", "write"]

Group = str | dist.ProcessGroup
Sizes = Sequence[int | torch.SymInt]

functional = implements("_c10d_functional", "_c10d_functional_autograd")


def parallel_groups(x: object, group: Group, group_size: int | None = None) -> Groups:
    """Return the parallel groups of `group` as indices of the shards of `x`: `((0, 2), (1, 3))`.

    The indices are ranks, except for a tensor on a mesh of some ranks, which has shards for these ranks alone.
    """
    name = group if isinstance(group, str) else group.group_name
    groups = groups_of(name)
    world = current_world()
    if not isinstance(x, RankTensor):
        raise WorldError(
            "a collective in a simulated world got a plain tensor, which has no value for each rank",
            "make it a RankTensor with `shardwise.world.replicate(tensor)`",
        )
    if world is not None and len(x.shards) != world.size:
        places = {rank: place for place, rank in enumerate(sorted(rank for ranks in groups for rank in ranks))}
        if len(places) != len(x.shards):
            raise WorldError(
                f"a collective of a tensor of {len(x.shards)} ranks in group {name!r}, which has {len(places)} ranks, "
                f"in a world of {world.size}",
                "use tensors of the running simulated world, and groups of the mesh that they are on",
            )
        groups = tuple(tuple(places[rank] for rank in ranks) for ranks in groups)
    sizes = {len(ranks) for ranks in groups}
    if group_size is not None and sizes != {group_size}:
        raise WorldError(
            f"a collective got group_size={group_size}, but group {name!r} consists of {groups}",
            "pass the number of ranks in the group",
        )
    return groups


def write(x: RankTensor, values: Sequence[torch.Tensor]) -> RankTensor:
    """Copy each rank's value into the memory of its shard."""
    for shard, value in zip(x.shards, values, strict=True):
        shard.copy_(value.view_as(shard))
    return x


@functional
def _wrap_tensor_autograd(x: RankTensor) -> RankTensor:
    """Return the tensor. PyTorch wraps it in one that waits for data; here the data is there."""
    return x


@functional
def wait_tensor(x: RankTensor) -> RankTensor:
    """Return the tensor: communication is finished when a collective returns."""
    return x


@functional
def all_reduce(x: RankTensor, reduce_op: str, group: Group) -> RankTensor:
    """Reduce over each group."""
    return wrap(tuple(collectives.all_reduce(x.shards, reduce_op, parallel_groups(x, group))))


@functional
def all_reduce_(x: RankTensor, reduce_op: str, group: Group) -> RankTensor:
    """Reduce over each group, in place."""
    return write(x, collectives.all_reduce(x.shards, reduce_op, parallel_groups(x, group)))


@functional
def all_gather_into_tensor(x: RankTensor, group_size: int, group: Group) -> RankTensor:
    """Concatenate the tensors of each group along dim 0."""
    return wrap(tuple(collectives.all_gather(x.shards, parallel_groups(x, group, group_size))))


@functional
def all_gather_into_tensor_out(x: RankTensor, group_size: int, group: Group, *, out: RankTensor) -> RankTensor:
    """Concatenate the tensors of each group along dim 0, into `out`."""
    return write(out, collectives.all_gather(x.shards, parallel_groups(x, group, group_size)))


@functional
def reduce_scatter_tensor(x: RankTensor, reduce_op: str, group_size: int, group: Group) -> RankTensor:
    """Reduce over each group, and split the rows of the result among its ranks."""
    return wrap(tuple(collectives.reduce_scatter(x.shards, reduce_op, parallel_groups(x, group, group_size))))


@functional
def all_to_all_single(x: RankTensor, receive: Sizes, send: Sizes, group: Group) -> RankTensor:
    """Send rows from each rank to each rank of its group."""
    return wrap(tuple(collectives.all_to_all(x.shards, receive, send, parallel_groups(x, group))))


@functional
def broadcast(x: RankTensor, src: int, group: Group) -> RankTensor:
    """Send the tensor of one rank of each group to the others."""
    return wrap(tuple(collectives.broadcast(x.shards, src, parallel_groups(x, group))))


@functional
def broadcast_(x: RankTensor, src: int, group: Group) -> RankTensor:
    """Send the tensor of one rank of each group to the others, in place."""
    return write(x, collectives.broadcast(x.shards, src, parallel_groups(x, group)))


@functional
def all_reduce_coalesced(xs: list[RankTensor], reduce_op: str, group: Group) -> list[RankTensor]:
    """Reduce several tensors."""
    return [all_reduce(x, reduce_op, group) for x in xs]


@functional
def all_reduce_coalesced_(xs: list[RankTensor], reduce_op: str, group: Group) -> list[RankTensor]:
    """Reduce several tensors, in place."""
    return [all_reduce_(x, reduce_op, group) for x in xs]


@functional
def all_gather_into_tensor_coalesced(xs: list[RankTensor], group_size: int, group: Group) -> list[RankTensor]:
    """Gather several tensors."""
    return [all_gather_into_tensor(x, group_size, group) for x in xs]


@functional
def reduce_scatter_tensor_coalesced(
    xs: list[RankTensor], reduce_op: str, group_size: int, group: Group
) -> list[RankTensor]:
    """Reduce and scatter several tensors."""
    return [reduce_scatter_tensor(x, reduce_op, group_size, group) for x in xs]
