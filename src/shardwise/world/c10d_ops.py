"""The ops behind `dist.all_reduce` and the like, `torch.ops.c10d`, on RankTensors. Each function is named after its op.

They work in place, and return a handle to wait for. Groups and reduce ops are passed as boxed C++ objects.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import ScriptObject, Tensor
from torch import distributed as dist

from .._torch.c10d import finished_work
from . import collectives
from .functional_ops import parallel_groups, write
from .implementation import implements
from .rank_tensor import RankTensor
from .registry import Groups

c10d = implements("c10d")


@c10d
def allreduce_(
    xs: list[RankTensor], group: ScriptObject, op: ScriptObject, *_: object, **__: object
) -> tuple[list[RankTensor], ScriptObject]:
    """Reduce each tensor over each group: `dist.all_reduce`."""
    for x in xs:
        write(x, collectives.all_reduce(x.shards, _reduce_op(op), parallel_groups(x, _unboxed(group))))
    return xs, finished_work()


@c10d
def broadcast_(
    xs: list[RankTensor], group: ScriptObject, root: int, *_: object, **__: object
) -> tuple[list[RankTensor], ScriptObject]:
    """Send the tensors of one rank of each group to the others: `dist.broadcast`."""
    for x in xs:
        write(x, collectives.broadcast(x.shards, root, parallel_groups(x, _unboxed(group))))
    return xs, finished_work()


@c10d
def _allgather_base_(
    out: RankTensor, x: RankTensor, group: ScriptObject, *_: object, **__: object
) -> tuple[RankTensor, ScriptObject]:
    """Concatenate the tensors of each group: `dist.all_gather_into_tensor`."""
    return write(out, collectives.all_gather(x.shards, parallel_groups(x, _unboxed(group)))), finished_work()


@c10d
def _reduce_scatter_base_(
    out: RankTensor, x: RankTensor, group: ScriptObject, op: ScriptObject, *_: object, **__: object
) -> tuple[RankTensor, ScriptObject]:
    """Reduce over each group and split the rows among its ranks: `dist.reduce_scatter_tensor`."""
    groups = parallel_groups(x, _unboxed(group))
    return write(out, collectives.reduce_scatter(x.shards, _reduce_op(op), groups)), finished_work()


@c10d
def allgather_into_tensor_coalesced_(
    outs: list[RankTensor], xs: list[RankTensor], group: ScriptObject, *_: object, **__: object
) -> ScriptObject:
    """Concatenate the tensors of each group, for several tensors in one call."""
    for out, x in zip(outs, xs, strict=True):
        write(out, collectives.all_gather(x.shards, parallel_groups(x, _unboxed(group))))
    return finished_work()


@c10d
def reduce_scatter_tensor_coalesced_(
    outs: list[RankTensor], xs: list[RankTensor], group: ScriptObject, op: ScriptObject, *_: object, **__: object
) -> ScriptObject:
    """Reduce over each group and split the rows among its ranks, for several tensors in one call."""
    for out, x in zip(outs, xs, strict=True):
        groups = parallel_groups(x, _unboxed(group))
        write(out, collectives.reduce_scatter(x.shards, _reduce_op(op), groups))
    return finished_work()


@c10d
def allgather_(
    outs: list[list[RankTensor]], xs: list[RankTensor], group: ScriptObject, *_: object, **__: object
) -> tuple[list[list[RankTensor]], ScriptObject]:
    """Copy the tensor of each rank of a group into the tensor at its place in the list: `dist.all_gather`."""
    for out, x in zip(outs, xs, strict=True):
        for place, one in enumerate(out):
            write(one, collectives.broadcast(x.shards, place, parallel_groups(x, _unboxed(group))))
    return outs, finished_work()


@c10d
def reduce_scatter_(
    outs: list[RankTensor], xs: list[list[RankTensor]], group: ScriptObject, op: ScriptObject, *_: object, **__: object
) -> tuple[list[RankTensor], ScriptObject]:
    """Reduce the tensor at each place of the list for the rank at that place: `dist.reduce_scatter`."""
    for out, tensors in zip(outs, xs, strict=True):
        groups = parallel_groups(out, _unboxed(group))
        reduced = [collectives.all_reduce(x.shards, _reduce_op(op), groups) for x in tensors]
        write(out, _at_own_place(reduced, groups))
    return outs, finished_work()


@c10d
def alltoall_(
    outs: list[RankTensor], xs: list[RankTensor], group: ScriptObject, *_: object, **__: object
) -> tuple[list[RankTensor], ScriptObject]:
    """Send the tensor at each place of the list to the rank at that place: `dist.all_to_all`."""
    groups = parallel_groups(xs[0], _unboxed(group))
    for place, out in enumerate(outs):
        write(out, _at_own_place([collectives.broadcast(x.shards, place, groups) for x in xs], groups))
    return outs, finished_work()


@c10d
def alltoall_base_(
    out: RankTensor,
    x: RankTensor,
    group: ScriptObject,
    receive: Sequence[int],
    send: Sequence[int],
    *_: object,
    **__: object,
) -> ScriptObject:
    """Send rows from each rank to each rank of its group: `dist.all_to_all_single`."""
    write(out, collectives.all_to_all(x.shards, receive, send, parallel_groups(x, _unboxed(group))))
    return finished_work()


@c10d
def barrier(*_: object, **__: object) -> ScriptObject:
    """Do nothing: simulated ranks run in lockstep."""
    return finished_work()


def _at_own_place(columns: Sequence[Sequence[Tensor]], groups: Groups) -> list[Tensor]:
    """Return for each rank `columns[place][rank]`, where `place` is its index in its group."""
    found = list(columns[0])
    for ranks in groups:
        for place, rank in enumerate(ranks):
            found[rank] = columns[place][rank]
    return found


def _unboxed(group: ScriptObject) -> dist.ProcessGroup:
    return dist.ProcessGroup.unbox(group)


def _reduce_op(boxed: ScriptObject) -> str:
    return dist.ReduceOp.RedOpType(boxed.op()).name.lower()  # type: ignore[attr-defined]
