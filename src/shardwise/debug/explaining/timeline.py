"""When ops and collectives run on each rank: measured in a process, modelled for simulated ranks.

Events are recorded while the program runs, and turned into spans later. Simulated ranks run one after the other in one
process, so that their times mean nothing: the time of an op is modelled by its floating-point operations and the memory
that it reads and writes, that of a collective by the cost model. Each rank has a clock. A collective begins when the
last of its ranks has reached it and the one before on the same axes is done; it runs beside ops until it is waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..._torch import pytree
from ..._torch.ops import OpOverload, packet_name
from ...world import RankTensor, current_world
from .records import Communication

Measured = tuple[float, float]


class Work(NamedTuple):
    """The floating-point operations of an op on one rank, and the bytes that it reads and writes."""

    flops: float
    nbytes: float


class Computed(NamedTuple):
    """An op on local tensors, the op on distributed tensors that it is part of, and the work of each simulated rank."""

    name: str
    part_of: str
    work: tuple[Work, ...]
    measured: Measured


class Communicated(NamedTuple):
    """A collective that was started, in each of the groups that run it side by side."""

    sent: Communication
    groups: tuple[tuple[int, ...], ...]
    measured: Measured
    pending: bool
    """Whether it is waited for by an op of its own; otherwise it is done when it returns."""


class Waited(NamedTuple):
    """The end of a collective, by its number: when it was waited for."""

    number: int
    measured: Measured


class Span(NamedTuple):
    """An op or collective on one rank, from `start` to `end`. `track` is "compute", or the axes of the collective."""

    rank: int
    track: str
    name: str
    start: float
    end: float
    about: Mapping[str, object]


class Timeline:
    """Collects events, and converts them to spans."""

    def __init__(self) -> None:
        self.events: list[Computed | Communicated | Waited] = []
        self.simulated = False
        self._pending: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        """For the result of each collective that is not waited for yet, its number."""
        # Where measured times begin: the clock of all processes of a machine.
        self.epoch = time.time() - time.perf_counter()

    # ---- events -----------------------------------------------------------------------------------------------------

    def computed(
        self,
        func: OpOverload,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        result: object,
        measured: Measured,
        part_of: str,
    ) -> None:
        """Record an op that ran on local tensors; `part_of` is the op on distributed tensors around it."""
        name = packet_name(func)
        if name.endswith("::wait_tensor"):
            number = self._pending.pop(args[0], None)
            if number is not None:
                self.events.append(Waited(number, measured))
            return
        work = _work(func, args, kwargs, result)
        self.simulated = self.simulated or bool(work)
        self.events.append(Computed(name, part_of, work, measured))

    def communicated(
        self, sent: Communication, groups: Iterable[tuple[int, ...]], result: object, measured: Measured, waits: bool
    ) -> None:
        """Record a collective that was started. If `waits`, it ends when the program waits for `result`."""
        self.simulated = current_world() is not None
        pending = waits and isinstance(result, Tensor)
        if pending:
            self._pending[result] = sent.number
        self.events.append(Communicated(sent, tuple(groups), measured, pending))

    # ---- spans ------------------------------------------------------------------------------------------------------

    def spans(self, flops_per_second: float, bytes_per_second: float) -> list[Span]:
        """Return the spans of each rank: measured for this process, modelled for simulated ranks."""
        if not self.simulated:
            return list(self._measured())
        return _Model(lambda work: max(work.flops / flops_per_second, work.nbytes / bytes_per_second)).run(self.events)

    def _measured(self) -> Iterable[Span]:
        rank = dist.get_rank() if dist.is_initialized() else 0
        done = {event.number: event.measured[1] for event in self.events if isinstance(event, Waited)}
        for event in self.events:
            if isinstance(event, Computed):
                start, end = event.measured
                yield Span(rank, "compute", event.name, *self._times(start, end), {"part of": event.part_of})
            elif isinstance(event, Communicated):
                start, end = event.measured
                end = done.get(event.sent.number, end)
                yield Span(rank, event.sent.group, event.sent.kind, *self._times(start, end), about(event.sent))

    def _times(self, start: float, end: float) -> tuple[float, float]:
        return self.epoch + start, self.epoch + end


class _Model:
    """The clocks of simulated ranks."""

    def __init__(self, seconds: Callable[[Work], float]) -> None:
        self._seconds = seconds
        self._clocks: dict[int, float] = {}
        self._links: dict[tuple[str, tuple[int, ...]], float] = {}
        """When each group is done with all its collectives so far."""
        self._ends: dict[tuple[int, int], float] = {}
        """When a rank's collective of this number is done."""

    def run(self, events: Sequence[Computed | Communicated | Waited]) -> list[Span]:
        spans: list[Span] = []
        for event in events:
            if isinstance(event, Computed):
                spans += self._compute(event)
            elif isinstance(event, Communicated):
                spans += self._communicate(event)
            else:
                for rank in self._ranks():
                    self._wait(rank, event.number)
        return spans

    def _ranks(self) -> list[int]:
        return sorted({rank for rank, _ in self._ends})

    def _wait(self, rank: int, number: int) -> None:
        self._clocks[rank] = max(self._clocks.get(rank, 0.0), self._ends.get((rank, number), 0.0))

    def _compute(self, event: Computed) -> Iterable[Span]:
        for rank, work in enumerate(event.work):
            start = self._clocks.get(rank, 0.0)
            end = self._clocks[rank] = start + self._seconds(work)
            details = {"part of": event.part_of, "flops": work.flops, "bytes": work.nbytes}
            yield Span(rank, "compute", event.name, start, end, details)

    def _communicate(self, event: Communicated) -> Iterable[Span]:
        sent = event.sent
        for group in event.groups:
            link = sent.group, group
            start = max([self._links.get(link, 0.0), *(self._clocks.get(rank, 0.0) for rank in group)])
            end = self._links[link] = start + sent.seconds
            for rank in group:
                self._ends[rank, sent.number] = end
                if not event.pending:
                    self._wait(rank, sent.number)
                yield Span(rank, sent.group, sent.kind, start, end, about(sent))


def about(sent: Communication) -> dict[str, object]:
    """Return the details that a trace viewer shows when a collective is clicked on."""
    return {
        "line": f"{sent.line}   {sent.line.text}" if sent.line is not None else "",
        "module": sent.module,
        "pass": sent.phase,
        "op": sent.op or "",
        "reason": sent.reason,
        "bytes": sent.bytes,
        "modelled seconds": sent.seconds,
        "number": sent.number,
    }


def _work(func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], result: object) -> tuple[Work, ...]:
    """Return the work of each simulated rank in an op; nothing on a process, whose times are measured."""
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
    ranks = max((len(t.shards) for t in tensors if isinstance(t, RankTensor)), default=0)
    if not ranks:
        return ()
    from torch.utils.flop_counter import flop_registry  # slow to import, and needed by traces alone

    count = flop_registry.get(func.overloadpacket)
    known: dict[tuple[object, ...], Work] = {}
    found = []
    for rank in range(ranks):
        own = [_of_rank(tensor, rank) for tensor in tensors]
        key = tuple(tensor.shape for tensor in own)
        if key not in known:
            flops = 0.0
            if count is not None:
                mine = pytree.tree_map_only(Tensor, lambda t: _of_rank(t, rank), (tuple(args), dict(kwargs), result))  # noqa: B023
                flops = float(count(*mine[0], **mine[1], out_val=mine[2]))
            known[key] = Work(flops, float(sum(tensor.nbytes for tensor in own)))
        found.append(known[key])
    return tuple(found)


def _of_rank(tensor: Tensor, rank: int) -> Tensor:
    return tensor.shards[rank] if isinstance(tensor, RankTensor) and rank < len(tensor.shards) else tensor
