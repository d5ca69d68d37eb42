"""The bytes that a rank receives in a collective, its group, and its name for users.

Collectives have the names that users write: `torch.ops.c10d_functional.all_reduce` for the functional ones, in
whichever namespace of PyTorch the op was called, and `torch.ops.c10d.allreduce_` for those behind `dist.all_reduce`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from .._torch.ops import OpOverload, OpOverloadPacket
from .._torch.script_objects import boxed_group_name
from ..comm.groups import ranks_of_group
from ..ops.collectives import FUNCTIONAL_NAMESPACES, CollectiveOp
from ..world import RankTensor, current_world, shards_of, values_of

_MESSAGES = {"send": "send", "receive": "recv_"}
"""The op of `c10d` that each op for messages between simulated ranks is counted as."""


def public_op(op: object) -> object:
    """Return the packet of an op, from the public namespace if it has one; anything else unchanged."""
    packet = op.overloadpacket if isinstance(op, OpOverload) else op
    if not isinstance(packet, OpOverloadPacket):
        return op
    namespace, _, name = str(packet).partition(".")
    if namespace == "shardwise" and name in _MESSAGES:
        return getattr(torch.ops.c10d, _MESSAGES[name])
    if namespace not in FUNCTIONAL_NAMESPACES:
        return packet
    # A collective in place (`all_reduce_`) counts under the name that users write (`all_reduce`).
    return getattr(torch.ops.c10d_functional, name.removesuffix("_"), packet)


def runs_its_own_code(kind: type[Tensor]) -> bool:
    """Return whether `__torch_dispatch__` of this type replaces an op by other ops, which modes then see themselves."""
    return kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ and not issubclass(kind, RankTensor)


def group_of(args: Sequence[object], kwargs: Mapping[str, object]) -> str:
    """Return the name of the group among the arguments of a collective."""
    named = [kwargs[name] for name in ("group_name", "process_group") if name in kwargs]
    for value in named or reversed(args):  # the reduction is a string too, and comes before the group
        name = value if isinstance(value, str) else boxed_group_name(value)
        if name is not None:
            return name
    raise AssertionError("every collective that is counted names its group")


def received_bytes(op: CollectiveOp, args: Sequence[object], kwargs: Mapping[str, object], result: object) -> int:
    """Return the bytes that a rank receives: among simulated ranks, the most that any of them receives."""
    group = group_of(args, kwargs)
    ranks = len(ranks_of_group(group)[0])
    got = _bytes(args[0] if op.writes_first else result)
    if op.received is None:
        splits = args[op.splits] if op.splits is not None else None
        return _exchanged(splits if splits and isinstance(splits, (list, tuple)) else [1] * ranks, got, group)
    return max(op.received(sent, its, ranks) for sent, its in zip(_bytes(args[op.input]), got, strict=False))


def _exchanged(splits: Sequence[int], got: list[int], group: str) -> int:
    """Return the bytes that an all-to-all receives from other ranks: its result without what a rank sends to itself."""
    rows = [[_value(size, rank) for size in splits] for rank in range(len(got))]
    return max(
        size * (sum(row) - row[position]) // max(sum(row), 1)
        for size, row, position in zip(got, rows, _positions(group, len(got)), strict=True)
        if position is not None
    )


def _value(size: int, rank: int) -> int:
    values = values_of(size)
    return size if values is None else values[rank]


def _positions(group: str, count: int) -> list[int | None]:
    """Return the position in its group of each rank that this process runs; None for a rank outside."""
    groups = ranks_of_group(group)
    own: Sequence[int] = [torch.distributed.get_rank()]
    if current_world() is not None:
        members = sorted(rank for ranks in groups for rank in ranks)
        own = members if len(members) == count else range(count)
    return [next((ranks.index(rank) for ranks in groups if rank in ranks), None) for rank in own]


def _bytes(value: object) -> list[int]:
    """Return the bytes of all tensors in an argument, for each rank that this process runs."""
    per_tensor = [[local.nbytes for local in shards_of(tensor)] for tensor in _tensors(value)]
    return [sum(of_rank) for of_rank in zip(*per_tensor, strict=True)] or [0]


def _tensors(value: object) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for element in value:
            yield from _tensors(element)
