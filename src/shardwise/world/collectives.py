"""Communication among the ranks of a simulated world, as plain tensor code.

The functional collectives (`torch.ops._c10d_functional`) called on RankTensors end here, so the code that
calls them is the same as in a world of real processes.

>>> with simulate(2):
...     x = RankTensor([torch.tensor([1.0]), torch.tensor([2.0])])
...     torch.ops._c10d_functional.all_reduce(x, "sum", dist.group.WORLD.group_name)
RankTensor(tensor([3.]), same on all 2 ranks)

Ranks add up in the order of their group, so a result never varies. No two ranks' results share memory. Ranks
outside the group keep what they had (all_reduce, broadcast) or get an empty tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..errors import WorldError
from .rank_int import values_of
from .ranks import RankTensor, implements, wrap
from .registry import Groups, current_world, groups_of

__all__: list[str] = []

Local = Sequence[torch.Tensor]

_functional = torch.ops._c10d_functional
_autograd = torch.ops._c10d_functional_autograd
_in_place = torch.ops.c10d


# Groups -----------------------------------------------------------------------------------------------


def _groups(x: object, group: Any, group_size: int | None = None) -> Groups:
    """The ranks that work together when `group`, by name or as an object, communicates `x`."""
    name = group if isinstance(group, str) else group.group_name
    groups = groups_of(name)
    world = current_world()
    if not isinstance(x, RankTensor):
        raise WorldError("a plain tensor among per-rank ones in one collective", "use `replicate(tensor)`")
    if world is not None and len(x.shards) != world.size:
        raise WorldError(
            f"a tensor of {len(x.shards)} ranks communicates in a world of {world.size}",
            "use tensors of the running simulated world",
        )
    sizes = {len(ranks) for ranks in groups}
    if group_size is not None and sizes != {group_size}:
        raise WorldError(
            f"group_size={group_size}, but group {name!r} is {groups}",
            "pass the number of ranks in the group",
        )
    return groups


def _same_shapes(shards: Local, ranks: Sequence[int], what: str) -> None:
    shape = shards[ranks[0]].shape
    for rank in ranks:
        if shards[rank].shape != shape:
            raise WorldError(
                f"{what}: rank {rank} passes {tuple(shards[rank].shape)}, rank {ranks[0]} {tuple(shape)}",
                "all ranks of a group pass the same shape: pad, or use all_to_all_single with split sizes",
            )


# What each rank gets: from one tensor per rank of the world to one per rank -----------------------------


def _add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.logical_or_(b) if a.dtype == torch.bool else a.add_(b)


_REDUCE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": _add,
    "avg": _add,
    "product": torch.Tensor.mul_,
    "min": lambda a, b: torch.minimum(a, b, out=a),
    "max": lambda a, b: torch.maximum(a, b, out=a),
    "band": torch.Tensor.bitwise_and_,
    "bor": torch.Tensor.bitwise_or_,
    "bxor": torch.Tensor.bitwise_xor_,
}


def _reduce(tensors: Local, op: str) -> torch.Tensor:
    """Combine the tensors of one group, first rank first."""
    combine = _REDUCE.get(op.lower())
    if combine is None:
        raise WorldError(f"reduce op {op!r}", f"use one of {', '.join(_REDUCE)}")
    total = tensors[0].clone(memory_format=torch.contiguous_format)
    for tensor in tensors[1:]:
        total = combine(total, tensor)
    if op.lower() != "avg":
        return total
    if not (total.is_floating_point() or total.is_complex()):
        raise WorldError(f"the average of {total.dtype} tensors", "sum them and divide, or use a float dtype")
    return total.div_(len(tensors))


def _reduced(shards: Local, op: str, groups: Groups) -> list[torch.Tensor]:
    out = list(shards)
    for ranks in groups:
        _same_shapes(shards, ranks, "all_reduce")
        total = _reduce([shards[rank] for rank in ranks], op)
        for rank in ranks:
            out[rank] = total
    return _apart(out, shards)


def _gathered(shards: Local, groups: Groups) -> list[torch.Tensor]:
    out = [_empty(s) for s in shards]
    for ranks in groups:
        _same_shapes(shards, ranks, "all_gather_into_tensor")
        whole = torch.cat([torch.atleast_1d(shards[rank]) for rank in ranks])
        for rank in ranks:
            out[rank] = whole
    return _apart(out)


def _scattered(shards: Local, op: str, groups: Groups) -> list[torch.Tensor]:
    out = [_empty(s) for s in shards]
    for ranks in groups:
        _same_shapes(shards, ranks, "reduce_scatter_tensor")
        rows = shards[ranks[0]].shape[0]
        if rows % len(ranks):
            raise WorldError(
                f"reduce_scatter_tensor of {rows} rows over {len(ranks)} ranks",
                "pad dim 0 to a multiple of the group's size",
            )
        total = _reduce([shards[rank] for rank in ranks], op)
        for rank, piece in zip(ranks, total.tensor_split(len(ranks)), strict=True):
            out[rank] = piece.clone()
    return out


def _broadcast(shards: Local, src: int, groups: Groups) -> list[torch.Tensor]:
    """`src` counts within each group."""
    out = list(shards)
    for ranks in groups:
        _same_shapes(shards, ranks, "broadcast")
        for rank in ranks:
            out[rank] = shards[ranks[src]]
    return _apart(out, shards)


def _exchanged(shards: Local, receive: Any, send: Any, groups: Groups) -> list[torch.Tensor]:
    out = [_empty(s) for s in shards]
    for ranks in groups:
        sizes = {rank: _splits(send, rank, len(ranks), shards[rank]) for rank in ranks}
        pieces = {rank: shards[rank].split(sizes[rank]) for rank in ranks}
        for place, rank in enumerate(ranks):
            out[rank] = torch.cat([pieces[peer][place] for peer in ranks])
            got = [sizes[peer][place] for peer in ranks]
            if receive and (want := _values(receive, rank)) != got:
                raise WorldError(
                    f"all_to_all_single: rank {rank} expects {want} rows of ranks {list(ranks)}, which send {got}",
                    "each rank's output_split_sizes must be what its peers' input_split_sizes say",
                )
    return out


def _values(sizes: Sequence[Any], rank: int) -> list[int]:
    """One rank's view of split sizes, each the same for all ranks or one per rank."""
    return [size if values is None else values[rank] for size in sizes for values in (values_of(size),)]


def _splits(sizes: Any, rank: int, n: int, local: torch.Tensor) -> list[int]:
    rows = local.shape[0] if local.dim() else 1
    if not sizes:
        if rows % n:
            raise WorldError(f"all_to_all_single of {rows} rows over {n} ranks", "give split sizes")
        return [rows // n] * n
    values = _values(sizes, rank)
    if len(values) != n or sum(values) != rows:
        raise WorldError(
            f"all_to_all_single: rank {rank} splits {rows} rows for {n} ranks into {values}",
            "give one size per rank of the group; they add up to dim 0",
        )
    return values


def _empty(shard: torch.Tensor) -> torch.Tensor:
    return shard.new_empty((0, *shard.shape[1:]))


def _apart(out: list[torch.Tensor], inputs: Local = ()) -> list[torch.Tensor]:
    """Give every rank memory of its own: a group's result is computed once, and may be one of the inputs."""
    taken = {id(tensor) for tensor in inputs}
    for rank, tensor in enumerate(out):
        if id(tensor) in taken:
            out[rank] = tensor.clone(memory_format=torch.contiguous_format)
        taken.add(id(tensor))
    return out


# The functional collectives ---------------------------------------------------------------------------


@implements(_functional.wait_tensor.default)
def _wait(x: RankTensor) -> RankTensor:
    return x


@implements(_functional.all_reduce.default)
def _all_reduce(x: RankTensor, reduce_op: str, group: Any) -> RankTensor:
    return wrap(tuple(_reduced(x.shards, reduce_op, _groups(x, group))))


@implements(_functional.all_reduce_.default)
def _all_reduce_(x: RankTensor, reduce_op: str, group: Any) -> RankTensor:
    return _write(x, _reduced(x.shards, reduce_op, _groups(x, group)))


@implements(_functional.all_gather_into_tensor.default, _autograd.all_gather_into_tensor.default)
def _all_gather(x: RankTensor, group_size: int, group: Any) -> RankTensor:
    return wrap(tuple(_gathered(x.shards, _groups(x, group, group_size))))


@implements(_functional.reduce_scatter_tensor.default, _autograd.reduce_scatter_tensor.default)
def _reduce_scatter(x: RankTensor, reduce_op: str, group_size: int, group: Any) -> RankTensor:
    return wrap(tuple(_scattered(x.shards, reduce_op, _groups(x, group, group_size))))


@implements(_functional.all_to_all_single.default, _autograd.all_to_all_single.default)
def _all_to_all(x: RankTensor, receive: Any, send: Any, group: Any) -> RankTensor:
    return wrap(tuple(_exchanged(x.shards, receive, send, _groups(x, group))))


@implements(_functional.broadcast.default)
def _broadcast_from(x: RankTensor, src: int, group: Any) -> RankTensor:
    return wrap(tuple(_broadcast(x.shards, src, _groups(x, group))))


@implements(_functional.broadcast_.default)
def _broadcast_from_(x: RankTensor, src: int, group: Any) -> RankTensor:
    return _write(x, _broadcast(x.shards, src, _groups(x, group)))


@implements(_functional.all_reduce_coalesced.default)
def _all_reduce_many(xs: list[RankTensor], reduce_op: str, group: Any) -> list[RankTensor]:
    return [_all_reduce(x, reduce_op, group) for x in xs]


@implements(_functional.all_reduce_coalesced_.default)
def _all_reduce_many_(xs: list[RankTensor], reduce_op: str, group: Any) -> list[RankTensor]:
    return [_all_reduce_(x, reduce_op, group) for x in xs]


@implements(_functional.all_gather_into_tensor_coalesced.default)
def _all_gather_many(xs: list[RankTensor], group_size: int, group: Any) -> list[RankTensor]:
    return [_all_gather(x, group_size, group) for x in xs]


@implements(_functional.reduce_scatter_tensor_coalesced.default)
def _reduce_scatter_many(xs: list[RankTensor], reduce_op: str, group_size: int, group: Any) -> list[RankTensor]:
    return [_reduce_scatter(x, reduce_op, group_size, group) for x in xs]


@implements(_functional.all_gather_into_tensor_out.default)
def _all_gather_out(x: RankTensor, group_size: int, group: Any, *, out: RankTensor) -> RankTensor:
    return _write(out, _gathered(x.shards, _groups(x, group, group_size)))


def _write(x: RankTensor, values: Local) -> RankTensor:
    """Put each rank's value into the memory it already has."""
    for shard, value in zip(x.shards, values, strict=True):
        shard.copy_(value.view_as(shard))
    return x


# The mutating ones behind dist.all_reduce and its kin: boxed arguments, and a handle to wait on --------


def _unboxed(group: Any) -> dist.ProcessGroup:
    return dist.ProcessGroup.unbox(group)


def _reduce_op(boxed: Any) -> str:
    return dist.ReduceOp.RedOpType(boxed.op()).name.lower()


def _done() -> Any:
    from torch._C._distributed_c10d import FakeWork

    return FakeWork().boxed()


@implements(_in_place.allreduce_.default)
def _dist_all_reduce(xs: list[RankTensor], group: Any, op: Any, *_: Any, **__: Any) -> Any:
    for x in xs:
        _all_reduce_(x, _reduce_op(op), _unboxed(group))
    return xs, _done()


@implements(_in_place.broadcast_.default)
def _dist_broadcast(xs: list[RankTensor], group: Any, root: int, *_: Any, **__: Any) -> Any:
    for x in xs:
        _broadcast_from_(x, root, _unboxed(group))
    return xs, _done()


@implements(_in_place._allgather_base_.default)
def _dist_all_gather(out: RankTensor, x: RankTensor, group: Any, *_: Any, **__: Any) -> Any:
    return _write(out, _gathered(x.shards, _groups(x, _unboxed(group)))), _done()


@implements(_in_place._reduce_scatter_base_.default)
def _dist_reduce_scatter(out: RankTensor, x: RankTensor, group: Any, op: Any, *_: Any, **__: Any) -> Any:
    return _write(out, _scattered(x.shards, _reduce_op(op), _groups(x, _unboxed(group)))), _done()
