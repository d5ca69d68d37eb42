"""Schedules: the order of forward and backward passes of a pipeline's stages over microbatches.

>>> schedule("1f1b", ranks=2, stages=2, microbatches=3)
[F0.0, F0.1, F1.0, B1.0, B0.0, F1.1, F0.2, B1.1, B0.1, F1.2, B1.2, B0.2]

`F1.0` is the forward pass of stage 1 on microbatch 0. Stage s is on rank s % ranks of the pipeline's axis. Every action
comes after those it depends on. Each rank runs its own actions in this order, and ranks run at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..errors import InputError

__all__ = ["Action", "schedule"]

SCHEDULES = ("gpipe", "1f1b")


class Action(NamedTuple):
    """One pass of one stage over one microbatch.

    >>> schedule("gpipe", ranks=2, stages=2, microbatches=1)
    [F0.0, F1.0, B1.0, B0.0]
    """

    backward: bool
    stage: int
    microbatch: int

    def __repr__(self) -> str:
        return f"{'B' if self.backward else 'F'}{self.stage}.{self.microbatch}"


def schedule(kind: str, *, ranks: int, stages: int, microbatches: int) -> list[Action]:
    """Return all actions of a step, in an order in which each comes after those it depends on.

    `"gpipe"`: all forward passes, then all backward passes. `"1f1b"`: a rank runs a backward pass as soon as it can, so
    that it holds the activations of few microbatches; with several stages on a rank it is the interleaved schedule.

    >>> schedule("1f1b", ranks=2, stages=2, microbatches=3)
    [F0.0, F0.1, F1.0, B1.0, B0.0, F1.1, F0.2, B1.1, B0.1, F1.2, B1.2, B0.2]
    """
    if kind not in SCHEDULES:
        raise InputError(f"there is no pipeline schedule {kind!r}", f"use one of {', '.join(SCHEDULES)}")
    if stages % ranks or stages < ranks:
        raise InputError(
            f"{stages} stages cannot be divided among {ranks} ranks of the pipeline",
            f"pass {ranks} stages, or a multiple of {ranks}",
        )
    queues = [_Rank(kind, rank, ranks, stages, microbatches) for rank in range(ranks)]
    done: dict[Action, int] = {}
    order: list[Action] = []
    tick = 0
    while len(order) < 2 * stages * microbatches:
        chosen = [queue.take(done, stages) for queue in queues]
        if not any(chosen):  # all ranks wait for one that has reached its limit: run one forward pass over the limit
            chosen = [next(filter(None, (queue.take(done, stages, patient=False) for queue in queues)))]
        for action in filter(None, chosen):
            done[action] = tick
            order.append(action)
        tick += 1
    return order


class _Rank:
    """The remaining actions of one rank of the pipeline, in order, for each direction."""

    def __init__(self, kind: str, rank: int, ranks: int, stages: int, microbatches: int) -> None:
        chunks = stages // ranks
        self.forward = list(_in_turns(rank, ranks, range(chunks), microbatches, backward=False))
        self.backward = list(_in_turns(rank, ranks, range(chunks - 1, -1, -1), microbatches, backward=True))
        # Forward passes that may be in flight: as many as run until the first gradient arrives.
        waiting = ranks - rank if chunks == 1 else 2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1
        self.limit = len(self.forward) if kind == "gpipe" else waiting
        self.forward_first = kind == "gpipe"
        self.in_flight = 0

    def take(self, done: dict[Action, int], stages: int, patient: bool = True) -> Action | None:
        """Remove and return the next action whose inputs are ready, or None; with `patient`, only within the limit."""
        queues = [self.backward, self.forward]
        for queue in reversed(queues) if self.forward_first else queues:
            if not queue or not all(need in done for need in _needs(queue[0], stages)):
                continue
            if not queue[0].backward and patient and self.in_flight >= self.limit:
                continue
            if queue[0].backward and self.forward_first and self.forward:
                continue
            self.in_flight += -1 if queue[0].backward else 1
            return queue.pop(0)
        return None


def _in_turns(rank: int, ranks: int, chunks: range, microbatches: int, *, backward: bool) -> Iterator[Action]:
    """Yield the actions of a rank in one direction: stage by stage for each group of `ranks` microbatches."""
    for first in range(0, microbatches, ranks):
        for chunk in chunks:
            for microbatch in range(first, min(first + ranks, microbatches)):
                yield Action(backward, chunk * ranks + rank, microbatch)


def _needs(action: Action, stages: int) -> Iterator[Action]:
    backward, stage, microbatch = action
    if not backward:
        if stage > 0:
            yield Action(False, stage - 1, microbatch)
    else:
        yield Action(False, stage, microbatch)
        if stage < stages - 1:
            yield Action(True, stage + 1, microbatch)
