"""The collectives of a simulated world as plain tensor code: from one tensor per rank to one tensor per rank.

>>> all_reduce([torch.tensor([1.0]), torch.tensor([2.0])], "sum", groups=((0, 1),))
[tensor([3.]), tensor([3.])]

Tensors are reduced in the order of the ranks in their group, so results are reproducible. No two ranks' results share
memory. Ranks outside all groups keep their tensor (all_reduce, broadcast) or get an empty one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..errors import WorldError
from .rank_int import values_of
from .registry import Groups

__all__ = ["all_gather", "all_reduce", "all_to_all", "broadcast", "reduce_scatter"]

Shards = Sequence[torch.Tensor]
Size = int | torch.SymInt


def all_reduce(shards: Shards, op: str, groups: Groups) -> list[torch.Tensor]:
    """Return the reduction over its group for every rank."""
    out = list(shards)
    for ranks in groups:
        _check_same_shapes(shards, ranks, "all_reduce")
        total = _reduce([shards[rank] for rank in ranks], op)
        for rank in ranks:
            out[rank] = total
    return _separate(out, shards)


def all_gather(shards: Shards, groups: Groups) -> list[torch.Tensor]:
    """Return the tensors of its group, concatenated along dim 0, for every rank."""
    out = [_empty(s) for s in shards]
    for ranks in groups:
        _check_same_shapes(shards, ranks, "all_gather_into_tensor")
        gathered = torch.cat([torch.atleast_1d(shards[rank]) for rank in ranks])
        for rank in ranks:
            out[rank] = gathered
    return _separate(out)


def reduce_scatter(shards: Shards, op: str, groups: Groups) -> list[torch.Tensor]:
    """Return its chunk, along dim 0, of the reduction over its group for every rank."""
    out = [_empty(s) for s in shards]
    for ranks in groups:
        _check_same_shapes(shards, ranks, "reduce_scatter_tensor")
        rows = shards[ranks[0]].shape[0]
        if rows % len(ranks):
            raise WorldError(
                f"reduce_scatter_tensor of {rows} rows over {len(ranks)} ranks, which do not divide them",
                f"pad dim 0 to a multiple of {len(ranks)}, the size of the group",
            )
        total = _reduce([shards[rank] for rank in ranks], op)
        for rank, piece in zip(ranks, total.tensor_split(len(ranks)), strict=True):
            out[rank] = piece.clone()
    return out


def broadcast(shards: Shards, src: int, groups: Groups) -> list[torch.Tensor]:
    """Return the tensor of the rank at position `src` of its group for every rank."""
    out = list(shards)
    for ranks in groups:
        _check_same_shapes(shards, ranks, "broadcast")
        for rank in ranks:
            out[rank] = shards[ranks[src]]
    return _separate(out, shards)


def all_to_all(shards: Shards, receive: Sequence[Size], send: Sequence[Size], groups: Groups) -> list[torch.Tensor]:
    """Return the rows that each rank of its group sends to it for every rank; without `send`, equal numbers of rows."""
    out = [_empty(s) for s in shards]
    for ranks in groups:
        sizes = {rank: _rows_sent(send, rank, len(ranks), shards[rank]) for rank in ranks}
        pieces = {rank: shards[rank].split(sizes[rank]) for rank in ranks}
        for place, rank in enumerate(ranks):
            out[rank] = torch.cat([pieces[peer][place] for peer in ranks])
            got = [sizes[peer][place] for peer in ranks]
            if receive and (want := _on_rank(receive, rank)) != got:
                raise WorldError(
                    f"all_to_all_single: rank {rank} expects {want} rows from ranks {list(ranks)}, which send {got}",
                    "make each rank's output_split_sizes agree with its peers' input_split_sizes",
                )
    return out


# ---- reducing -----------------------------------------------------------------------------------------------------


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


def _reduce(tensors: Shards, op: str) -> torch.Tensor:
    """Reduce the tensors of one group, first rank first."""
    combine = _REDUCE.get(op.lower())
    if combine is None:
        raise WorldError(
            f"the reduce op {op!r} is not available in a simulated world", f"use one of {', '.join(_REDUCE)}"
        )
    total = tensors[0].clone(memory_format=torch.contiguous_format)
    for tensor in tensors[1:]:
        total = combine(total, tensor)
    if op.lower() != "avg":
        return total
    if not (total.is_floating_point() or total.is_complex()):
        raise WorldError(f"tensors of {total.dtype} cannot be averaged", "sum them and divide, or use a float dtype")
    return total.div_(len(tensors))


# ---- sizes and memory ---------------------------------------------------------------------------------------------


def _check_same_shapes(shards: Shards, ranks: Sequence[int], what: str) -> None:
    shape = shards[ranks[0]].shape
    for rank in ranks:
        if shards[rank].shape != shape:
            raise WorldError(
                f"{what}: rank {rank} passes {tuple(shards[rank].shape)}, rank {ranks[0]} {tuple(shape)}",
                "pass the same shape on all ranks of a group: pad, or use all_to_all_single with split sizes",
            )


def _on_rank(sizes: Sequence[Size], rank: int) -> list[int]:
    """Return split sizes as one rank passes them; each is the same for all ranks or one per rank."""
    return [int(size) if (values := values_of(size)) is None else values[rank] for size in sizes]


def _rows_sent(sizes: Sequence[Size], rank: int, n: int, local: torch.Tensor) -> list[int]:
    """Return how many rows a rank sends to each of the `n` ranks of its group."""
    rows = local.shape[0] if local.dim() else 1
    if not sizes:
        if rows % n:
            raise WorldError(
                f"all_to_all_single of {rows} rows over {n} ranks, which do not divide them",
                "pass input_split_sizes and output_split_sizes",
            )
        return [rows // n] * n
    found = _on_rank(sizes, rank)
    if len(found) != n or sum(found) != rows:
        raise WorldError(
            f"all_to_all_single: rank {rank} splits {rows} rows for {n} ranks into {found}",
            "pass one size per rank of the group, which add up to the size of dim 0",
        )
    return found


def _empty(shard: torch.Tensor) -> torch.Tensor:
    return shard.new_empty((0, *shard.shape[1:]))


def _separate(out: list[torch.Tensor], inputs: Shards = ()) -> list[torch.Tensor]:
    """Copy results that several ranks share, or that are inputs, so that every rank has memory of its own."""
    taken = {id(tensor) for tensor in inputs}
    for rank, tensor in enumerate(out):
        if id(tensor) in taken:
            out[rank] = tensor.clone(memory_format=torch.contiguous_format)
        taken.add(id(tensor))
    return out
