"""Running an op that writes its arguments: into the memory of every shard. It returns the same tensor objects."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .._torch.wrapper import set_metadata
from ..errors import WorldError
from .agreement import same
from .mapping import by_rank, flat, join, map_op
from .per_rank import replicate
from .rank_op import RankOp
from .rank_tensor import RankTensor, wrap

__all__ = ["run_writing"]


def run_writing(op: RankOp, args: Sequence[object], kwargs: dict[str, object] | None) -> object:
    """Run an op that writes to some of its arguments on every rank."""
    kwargs = kwargs or {}
    originals = [args[i] if i < len(args) else kwargs.get(name) for i, name in op.writes]
    targets = [t for t in flat(originals) if isinstance(t, torch.Tensor)]
    plain = [t for t in targets if not isinstance(t, RankTensor)]
    copies: dict[int, RankTensor] = {}
    if plain:
        n = next(len(c) for c in map(by_rank, (*args, *kwargs.values())) if c is not None)
        copies = {id(t): replicate(t, n) for t in plain}
        args = [_substitute(value, copies) for value in args]
        kwargs = {name: _substitute(value, copies) for name, value in kwargs.items()}
    if op.resizes:
        for t in targets:
            if isinstance(t, RankTensor):
                # A tensor detached from this one may hold the same shards, and must keep its sizes.
                t.shards = tuple(s.detach() for s in t.shards)
    results = map_op(op, args, kwargs)
    for t in plain:
        _write_back(op, t, copies[id(t)])
    if op.resizes:
        for t in targets:
            if isinstance(t, RankTensor):
                set_metadata(t, wrap(t.shards))
    if len(op.returns) == 1 and op.returns[0] is not None:
        return originals[op.writes.index(op.returns[0])]
    joined = join(results, op.name)
    if not any(op.returns):
        return joined
    return tuple(
        result if place is None else originals[op.writes.index(place)]
        for result, place in zip(joined, op.returns, strict=True)
    )


def _substitute(value: object, copies: dict[int, RankTensor]) -> object:
    """Return an argument with plain tensors replaced by their per-rank copies."""
    if isinstance(value, (list, tuple)):
        return [_substitute(item, copies) for item in value]
    return copies.get(id(value), value)


def _write_back(op: RankOp, target: torch.Tensor, copies: RankTensor) -> None:
    """Copy the value that every rank wrote into its copy to a plain tensor, which all ranks share."""
    if not same(copies.shards):
        raise WorldError(
            f"{op.name} would write different values of the ranks into one plain tensor",
            "make it a RankTensor first, with `shardwise.world.replicate(tensor)`",
        )
    value = copies.shards[0]
    if target.shape != value.shape:
        target.resize_(value.shape)
    target.copy_(value)
