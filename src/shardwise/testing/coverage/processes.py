"""Entries on four gloo processes, which are forked for up to 16 entries at a time.

If the ranks do not agree whether a trial failed, or one of them crashes or hangs, they end, and new processes continue
with the next entry.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from ..children import in_children, meeting_file, store_at
from .entry import Effort, Outcome, cover
from .samples import Sweep
from .sides import Processes

RANKS = 4
TIMEOUT = timedelta(seconds=30)  # for one collective
MOST = 40.0  # seconds for an entry, on average
TOGETHER = 16  # entries that one set of processes is given

SideOfRank = Callable[["Ranks"], Processes]


class Ranks:
    """A store through which the ranks agree on failures, and send outcomes to the parent process."""

    def __init__(self, rank: int, path: str) -> None:
        self.rank, self.trials, self.in_step = rank, 0, True
        self.store = store_at(path, 2 * TIMEOUT)

    def agree(self, failed: bool) -> bool:
        """Return whether all ranks agree that a trial failed, or that it did not."""
        self.trials += 1
        self.store.set(f"{self.trials}/{self.rank}", str(failed))
        answers = {self.store.get(f"{self.trials}/{rank}") for rank in range(RANKS)}
        self.in_step = len(answers) == 1
        return self.in_step


def cover_on_processes(
    names: Sequence[str], effort: Effort, side: SideOfRank, seed: int, sweep: Sweep
) -> list[Outcome]:
    """Return the outcomes of entries on four processes: the worst of the ranks for each."""
    done: list[Outcome] = []
    while len(done) < len(names):
        left = names[len(done) :]
        with meeting_file() as path:
            ranks = {rank: partial(_rank, rank, path, left, effort, side, seed, sweep) for rank in range(RANKS)}
            lost = dict(in_children(ranks, RANKS, MOST * len(left)))
            store = store_at(path, TIMEOUT)
            for name in left:
                keys = [f"{name}/{rank}" for rank in range(RANKS)]
                if not store.check(keys):
                    reasons = ", ".join(sorted({str(reason) for reason in lost.values()}))
                    done.append(Outcome(name, "error", failures=[f"error: the ranks ended: {reasons}"]))
                    break
                found = [Outcome(**json.loads(store.get(key))) for key in keys]
                done.append(min(found, key=lambda outcome: ("wrong", "error", "ok", "none").index(outcome.status)))
    return done


def _rank(
    rank: int, path: str, names: Sequence[str], effort: Effort, side: SideOfRank, seed: int, sweep: Sweep
) -> None:
    ranks = Ranks(rank, path)
    dist.init_process_group("gloo", store=ranks.store, rank=rank, world_size=RANKS, timeout=TIMEOUT)
    mine = side(ranks)
    for name in names:
        outcome = cover(name, effort, mine, seed, sweep)
        ranks.store.set(f"{name}/{rank}", json.dumps(asdict(outcome)))
        if not ranks.in_step:
            return
