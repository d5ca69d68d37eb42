"""Reductions that share a collective: the local tensors of a bucket are sent as one buffer.

>>> bucket = Bucket()
>>> first, second = bucket.add(reduction, x), bucket.add(reduction, y)
>>> bucket.start()                  # one all-reduce of x and y, under way on return

"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._torch.below_autograd import below_autograd
from .._torch.collectives import all_reduce, all_reduce_, reduce_scatter, wait
from .._torch.tools import shown_in_profile
from ..sharding.cache import ENTRY_BYTES
from ..sharding.layout import Layout
from ..sharding.mesh import MeshInfo
from ..sharding.runtime import Runtime, WorldCache, on_activate
from ..sharding.spec import DTensorSpec
from .even_moves import pack_for_scatter
from .move import Move, group_of_step
from .on_ranks import LocalOp, on_ranks
from .plan import ALL_REDUCE, REDUCE_SCATTER, Step
from .redistribute import carry_out, moves_between, plan_redistribution
from .transport import divided_sum, from_wire, reduces_natively, to_wire, wire_op


class Channel(NamedTuple):
    """The properties that reductions must share to be sent by one collective."""

    kind: str
    op: str
    divisor: int
    group: str
    ranks: int
    dtype: torch.dtype


class Reduction(NamedTuple):
    """A redistribution whose last collective is an all-reduce or a reduce-scatter that it can share with others.

    `before` are the moves before that collective. `pack` returns the vector to send, or for a reduce-scatter a matrix
    with a row for each rank. `unpack` returns the local tensor for the vector that was received.
    """

    channel: Channel
    before: tuple[Move, ...]
    pack: LocalOp
    unpack: LocalOp
    nbytes: int
    """The most bytes that any rank sends: the same number on all ranks."""


_REDUCTIONS: WorldCache[tuple[DTensorSpec, DTensorSpec], Reduction | bool] = WorldCache(
    "reductions in buckets", 8 << 20, lambda pair, found: ENTRY_BYTES + 1024
)


_active: dict[tuple[DTensorSpec, DTensorSpec], Reduction | bool]
"""The entries of the active world's `_REDUCTIONS` that were used recently."""


def _use_reductions_of(runtime: Runtime) -> None:
    global _active
    _active = _REDUCTIONS.of(runtime).recent


on_activate(_use_reductions_of)


def reduction_between(source: DTensorSpec, target: DTensorSpec) -> Reduction | None:
    """Return the reduction from one spec to another, or None if its last collective cannot be shared."""
    found = _active.get((source, target))
    if found is None:
        cache = _REDUCTIONS.of(source.mesh_info.runtime)
        found = cache.get((source, target))
        if found is None:
            found = cache[source, target] = _find(source, target) or False
    return found or None  # type: ignore[return-value]


def _find(source: DTensorSpec, target: DTensorSpec) -> Reduction | None:
    mesh_info = source.mesh_info
    if mesh_info.outside or source.shape.numel() == 0:
        return None
    steps = plan_redistribution(source, target).plan.steps
    last = max((index for index, step in enumerate(steps) if step.axes), default=-1)
    if last < 0 or not _can_share(steps[last], source.dtype):
        return None
    step, moves = steps[last], moves_between(source, target)
    group, ranks = group_of_step(step, mesh_info)
    return Reduction(
        Channel(step.kind, step.op, step.divisor, group, ranks, source.dtype),
        moves[:last],
        _pack(step, ranks),
        _then(_with_shape(step.after, mesh_info), moves[last + 1 :]),
        step.before.max_local_numel() * source.dtype.itemsize,
    )


def _can_share(step: Step, dtype: torch.dtype) -> bool:
    even = step.before.is_even() and step.after.is_even()
    return reduces_natively(dtype, step.op) and (step.kind == ALL_REDUCE or (step.kind == REDUCE_SCATTER and even))


def _pack(step: Step, ranks: int) -> LocalOp:
    if step.kind == ALL_REDUCE:
        return lambda local: local.reshape(-1)
    pack = pack_for_scatter(step)
    return lambda local: pack(local).view(ranks, -1)


def _with_shape(layout: Layout, mesh_info: MeshInfo) -> LocalOp:
    if layout.is_even():
        shape = layout.local_shape((0,) * len(mesh_info.sizes))
        return lambda piece: piece.view(shape)
    return on_ranks(mesh_info, lambda at, piece: piece.view(layout.local_shape(at)))


def _then(first: LocalOp, moves: Sequence[Move]) -> LocalOp:
    """Return a function that calls `first`, then runs these moves, which do not communicate."""
    if not moves:
        return first

    def run(piece: Tensor) -> Tensor:
        local = first(piece)
        for move in moves:
            local = move.start(local)
        return local

    return run


class Bucket:
    """Local tensors that are reduced by one collective. All have the same channel and device."""

    __slots__ = ("__weakref__", "_locals", "_raw", "_reductions", "_results", "_sizes", "lock", "nbytes", "started")

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.nbytes, self.started = 0, False
        self._reductions: list[Reduction] = []
        self._locals: list[Tensor] = []
        self._sizes: list[int] = []
        self._raw: Tensor | None = None
        self._results: list[Tensor] | None = None

    def add(self, reduction: Reduction, local: Tensor) -> int | None:
        """Add a local tensor, and return its index; None if the collective was started already.

        The tensor must not be written until the collective is done.
        """
        with self.lock:
            if self.started:
                return None
            if reduction.before:
                with below_autograd():
                    local = carry_out(reduction.before, local)
            self._locals.append(local)
            self._reductions.append(reduction)
            self.nbytes += reduction.nbytes
            return len(self._locals) - 1

    def start(self) -> None:
        """Start the collective, unless it was started."""
        if self.started:
            return
        with self.lock, below_autograd():
            if not self.started:
                self.started = True
                kind = self._reductions[0].channel.kind
                with shown_in_profile("shardwise::{} of {} gradients", kind, len(self._locals)):
                    self._start()

    def _start(self) -> None:
        kind, op, divisor, group, ranks, dtype = self._reductions[0].channel
        scale, _ = divided_sum(divisor, dtype)
        packed = [reduction.pack(local) for reduction, local in zip(self._reductions, self._locals, strict=True)]
        self._locals.clear()
        self._sizes = [each.shape[-1] for each in packed]
        op_sent, alone = wire_op(dtype, op), len(packed) == 1
        joined = packed[0] if alone else torch.cat(packed, -1)
        sent = to_wire(scale(joined.contiguous().view(-1)), op)
        if kind == REDUCE_SCATTER:
            self._raw = reduce_scatter(sent, op_sent, ranks, group)
        else:  # a tensor that is alone was not copied, and others may read it
            self._raw = (all_reduce if alone else all_reduce_)(sent, op_sent, group)

    def results(self) -> list[Tensor]:
        """Wait for the collective, and return the reduced local tensors: views of what was received."""
        with self.lock:
            if self._results is None:
                self.start()
                assert self._raw is not None
                _, op, divisor, _, _, dtype = self._reductions[0].channel
                _, divide = divided_sum(divisor, dtype)
                with below_autograd():
                    raw, self._raw = wait(self._raw), None
                    received = divide(from_wire(raw, dtype, op))
                    pieces = received.split_with_sizes(self._sizes) if len(self._sizes) > 1 else [received]
                    unpacked = zip(self._reductions, pieces, strict=True)
                    self._results = [reduction.unpack(piece) for reduction, piece in unpacked]
            return self._results

    def __del__(self) -> None:
        if self._raw is not None:  # the results were never used; backends warn of collectives without a wait
            wait(self._raw)
