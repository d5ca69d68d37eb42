"""What counts as a collective, and how many bytes it brings to a rank.

Collectives are told by the names that users write: `torch.ops.c10d_functional.all_reduce` for the functional ones,
whichever of PyTorch's namespaces was called, and `torch.ops.c10d.allreduce_` for those behind `dist.all_reduce`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch.ops import OpOverload, OpOverloadPacket
from ..comm.groups import ranks_of_group
from ..world import RankTensor, current_world, values_of

_FUNCTIONAL = ("c10d_functional", "_c10d_functional", "_c10d_functional_autograd")

# What a collective is called in tables, by the op's name, and how the bytes that a rank receives are counted.
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all-reduce", "all-gather", "reduce-scatter"
ALL_TO_ALL, BROADCAST = "all-to-all", "broadcast"
_KINDS = {
    "all_reduce": ALL_REDUCE,
    "all_reduce_": ALL_REDUCE,
    "all_reduce_coalesced": ALL_REDUCE,
    "all_reduce_coalesced_": ALL_REDUCE,
    "all_gather_into_tensor": ALL_GATHER,
    "all_gather_into_tensor_out": ALL_GATHER,
    "all_gather_into_tensor_coalesced": ALL_GATHER,
    "reduce_scatter_tensor": REDUCE_SCATTER,
    "reduce_scatter_tensor_coalesced": REDUCE_SCATTER,
    "all_to_all_single": ALL_TO_ALL,
    "broadcast": BROADCAST,
    "broadcast_": BROADCAST,
}
_IN_PLACE_KINDS = {
    "allreduce_": ALL_REDUCE,
    "allreduce_coalesced_": ALL_REDUCE,
    "allgather_": ALL_GATHER,
    "_allgather_base_": ALL_GATHER,
    "allgather_coalesced_": ALL_GATHER,
    "allgather_into_tensor_coalesced_": ALL_GATHER,
    "reduce_scatter_": REDUCE_SCATTER,
    "_reduce_scatter_base_": REDUCE_SCATTER,
    "reduce_scatter_tensor_coalesced_": REDUCE_SCATTER,
    "alltoall_": ALL_TO_ALL,
    "alltoall_base_": ALL_TO_ALL,
    "broadcast_": BROADCAST,
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
}


def public_op(op: Any) -> Any:
    """The op that users name: its packet, of the public namespace where there is one."""
    packet = op.overloadpacket if isinstance(op, OpOverload) else op
    if not isinstance(packet, OpOverloadPacket):
        return op
    namespace, _, name = packet._qualified_op_name.partition("::")
    if namespace not in _FUNCTIONAL:
        return packet
    return getattr(torch.ops.c10d_functional, name, packet)


def kind_of(op: OpOverload) -> str | None:
    """What kind of collective an op is; None for other ops."""
    if op.namespace in _FUNCTIONAL:
        return _KINDS.get(op._schema.name.partition("::")[2])
    if op.namespace == "c10d":
        return _IN_PLACE_KINDS.get(op._schema.name.partition("::")[2])
    return None


def group_of(args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """The name of the group that a collective's arguments speak of."""
    for value in (*reversed(args), *kwargs.values()):
        if isinstance(value, str) and value.lower() not in _REDUCTIONS:
            return value
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return torch.distributed.ProcessGroup.unbox(value).group_name
    raise AssertionError("every collective that is counted names its group")


_REDUCTIONS = {"sum", "avg", "product", "min", "max", "band", "bor", "bxor", "unused", "premul_sum"}


def received_bytes(op: OpOverload, kind: str, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> int:
    """The bytes that a rank receives: of simulated ranks, the one that receives most.

    Reductions are counted as rings do them: an all-reduce is a reduce-scatter and an all-gather.
    """
    ranks = len(ranks_of_group(group_of(args, kwargs))[0])
    in_place = op.namespace == "c10d"
    sent = _bytes(args[1] if in_place and len(args) > 1 and _has_tensors(args[1]) else args[0])
    got = _bytes(args[0] if in_place else result)
    if kind == ALL_TO_ALL:
        return _exchanged(op, args, kwargs, got, ranks)
    counts: dict[str, Callable[[int, int], int]] = {
        ALL_REDUCE: lambda sent, got: 2 * got * (ranks - 1) // ranks,
        ALL_GATHER: lambda sent, got: got - sent,
        REDUCE_SCATTER: lambda sent, got: got * (ranks - 1),
        "gather": lambda sent, got: max(got - sent, 0),
    }
    count = counts.get(kind, lambda sent, got: got)
    return max(map(count, sent, got))


def _exchanged(op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], got: list[int], ranks: int) -> int:
    """What an all-to-all brings from others: everything but what a rank sends to itself."""
    base = op._schema.name == "c10d::alltoall_base_"
    splits = args[3] if base else args[1] if op.namespace in _FUNCTIONAL else None
    rows = [[_value(size, rank) for size in splits or [1] * ranks] for rank in range(len(got))]
    places = _places(group_of(args, kwargs), len(got))
    return max(
        size * (sum(row) - row[place]) // max(sum(row), 1)
        for size, row, place in zip(got, rows, places, strict=True)
        if place is not None
    )


def _value(size: Any, rank: int) -> int:
    values = values_of(size)
    return size if values is None else values[rank]


def _places(group: str, count: int) -> list[int | None]:
    """The place in its group of each rank that this process stands for."""
    groups = ranks_of_group(group)
    own = range(count) if current_world() is not None else [torch.distributed.get_rank()]
    return [next((ranks.index(rank) for ranks in groups if rank in ranks), None) for rank in own]


def _bytes(value: Any) -> list[int]:
    """The bytes of all tensors in an argument, for each rank that this process stands for."""
    per_tensor = [[shard.nbytes for shard in _shards(tensor)] for tensor in _tensors(value)]
    return [sum(column) for column in zip(*per_tensor, strict=True)] or [0]


def _shards(tensor: Tensor) -> Sequence[Tensor]:
    return tensor.shards if isinstance(tensor, RankTensor) else (tensor,)


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for element in value:
            yield from _tensors(element)


def _has_tensors(value: Any) -> bool:
    return next(iter(_tensors(value)), None) is not None
