"""The collectives among PyTorch's ops: their names, and how many bytes a rank receives.

>>> collective_of(torch.ops._c10d_functional.all_reduce.default).kind
'all-reduce'

The functional collectives return their result. Those in the namespace `c10d`, behind `torch.distributed.all_reduce` and
others, write it into their first argument. A DTensor as an argument of either is refused. Messages from rank to rank,
`dist.send` and `dist.recv`, count as well; in a simulated world `shardwise::send` and `shardwise::receive` stand
for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .._torch.ops import OpOverload, packet_name

FUNCTIONAL_NAMESPACES = frozenset(("c10d_functional", "_c10d_functional", "_c10d_functional_autograd"))
_NAMESPACES = FUNCTIONAL_NAMESPACES | {"c10d"}
_COUNTED = _NAMESPACES | {"shardwise"}
_WITHOUT_DATA = frozenset(("barrier", "monitored_barrier_", "wait_tensor", "_wrap_tensor_autograd", "check_for_nan"))

Received = Callable[[int, int, int], int]
"""From the bytes of a rank's input, those of its result, and the number of ranks, to the bytes that it receives."""


@dataclass(frozen=True)
class CollectiveOp:
    """What is known about a collective. Reductions are counted as rings compute them."""

    kind: str
    """What tables call it: `all-reduce`, `all-gather`, ..."""
    received: Received | None
    """The bytes that a rank receives; None for an all-to-all, where they follow from the split sizes."""
    input: int = 0
    """The position of the argument that is sent."""
    splits: int | None = None
    """The position of the split sizes of the result, if the op has them."""
    writes_first: bool = False
    """Whether the result is written into the first argument."""


def collective_of(func: OpOverload) -> CollectiveOp | None:
    """Return the record of a collective; None for other ops."""
    return _COLLECTIVES.get(packet_name(func)) if func.namespace in _COUNTED else None


def collective_names() -> dict[str, str]:
    """Return what each op does, by the op's name: `{"all_gather_into_tensor": "all_gather", ...}`."""
    ops = {name.partition("::")[2]: op.kind.replace("-", "_") for name, op in _COLLECTIVES.items()}
    return {**ops, **{kind: kind for kind in ops.values()}}


def communicates(func: OpOverload) -> bool:
    """Return whether an op is a collective, or sends to another rank or receives from one."""
    return func.namespace in _NAMESPACES and packet_name(func).partition("::")[2] not in _WITHOUT_DATA


def _all_reduce(sent: int, got: int, ranks: int) -> int:
    return 2 * got * (ranks - 1) // ranks  # a reduce-scatter and an all-gather


def _all_gather(sent: int, got: int, ranks: int) -> int:
    return got - sent


def _reduce_scatter(sent: int, got: int, ranks: int) -> int:
    return got * (ranks - 1)


def _gather(sent: int, got: int, ranks: int) -> int:
    return max(got - sent, 0)  # only one rank has a result


def _result(sent: int, got: int, ranks: int) -> int:
    return got


def _nothing(sent: int, got: int, ranks: int) -> int:
    return 0


_FUNCTIONAL = {
    "all_reduce": CollectiveOp("all-reduce", _all_reduce),
    "all_reduce_": CollectiveOp("all-reduce", _all_reduce),
    "all_reduce_coalesced": CollectiveOp("all-reduce", _all_reduce),
    "all_reduce_coalesced_": CollectiveOp("all-reduce", _all_reduce),
    "all_gather_into_tensor": CollectiveOp("all-gather", _all_gather),
    "all_gather_into_tensor_out": CollectiveOp("all-gather", _all_gather),
    "all_gather_into_tensor_coalesced": CollectiveOp("all-gather", _all_gather),
    "reduce_scatter_tensor": CollectiveOp("reduce-scatter", _reduce_scatter),
    "reduce_scatter_tensor_out": CollectiveOp("reduce-scatter", _reduce_scatter),
    "reduce_scatter_tensor_coalesced": CollectiveOp("reduce-scatter", _reduce_scatter),
    "all_to_all_single": CollectiveOp("all-to-all", None, splits=1),
    "broadcast": CollectiveOp("broadcast", _result),
    "broadcast_": CollectiveOp("broadcast", _result),
}

_IN_PLACE = {
    "allreduce_": CollectiveOp("all-reduce", _all_reduce, writes_first=True),
    "allreduce_coalesced_": CollectiveOp("all-reduce", _all_reduce, writes_first=True),
    "allgather_": CollectiveOp("all-gather", _all_gather, input=1, writes_first=True),
    "_allgather_base_": CollectiveOp("all-gather", _all_gather, input=1, writes_first=True),
    "allgather_coalesced_": CollectiveOp("all-gather", _all_gather, input=1, writes_first=True),
    "allgather_into_tensor_coalesced_": CollectiveOp("all-gather", _all_gather, input=1, writes_first=True),
    "reduce_scatter_": CollectiveOp("reduce-scatter", _reduce_scatter, input=1, writes_first=True),
    "_reduce_scatter_base_": CollectiveOp("reduce-scatter", _reduce_scatter, input=1, writes_first=True),
    "reduce_scatter_tensor_coalesced_": CollectiveOp("reduce-scatter", _reduce_scatter, input=1, writes_first=True),
    "alltoall_": CollectiveOp("all-to-all", None, input=1, writes_first=True),
    "alltoall_base_": CollectiveOp("all-to-all", None, input=1, splits=3, writes_first=True),
    "broadcast_": CollectiveOp("broadcast", _result, writes_first=True),
    "reduce_": CollectiveOp("reduce", _result, writes_first=True),
    "gather_": CollectiveOp("gather", _gather, input=1, writes_first=True),
    "scatter_": CollectiveOp("scatter", _result, writes_first=True),
}

SEND, RECEIVE = CollectiveOp("send", _nothing, writes_first=True), CollectiveOp("receive", _result, writes_first=True)
"""Messages between two ranks. The sender receives nothing. The tensors are the first argument of both."""

_COLLECTIVES = {
    "c10d::send": SEND,
    "c10d::recv_": RECEIVE,
    "shardwise::send": SEND,
    "shardwise::receive": RECEIVE,
    **{f"{space}::{name}": op for space in FUNCTIONAL_NAMESPACES for name, op in _FUNCTIONAL.items()},
    **{f"c10d::{name}": op for name, op in _IN_PLACE.items()},
}
