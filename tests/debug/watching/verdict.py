"""Whether the ranks of a divergence ended as they should."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tests.debug.watching.divergences import CASES, RAISED
from tests.debug.watching.ranks import RANKS, Outcome


def complaint(name: str, outcomes: Sequence[Outcome | None]) -> str:
    """What is wrong with the outcomes of a case; empty if nothing is."""
    odd = CASES[name][1]
    for rank, outcome in enumerate(outcomes):
        if outcome is None:
            return f"rank {rank} hung or died"
        if name.startswith(RAISED):
            if rank == odd and outcome.error == "WatchError":
                return f"rank {rank} lost its own error"
            if rank != odd and f"rank {odd} raised" not in outcome.text:
                return f"rank {rank} does not know who raised"
            if rank != odd and "divergences.py:" not in outcome.text:
                return f"rank {rank} does not name the line"
        elif outcome.error != "WatchError":
            return f"rank {rank} did not stop"
        elif "wait for each other" in outcome.text:
            if name not in ("other order: two groups", "other order: dist call and redistribution"):
                return f"rank {rank} calls it a deadlock"
        elif not re.search(rf"^  rank {odd}: ", outcome.text, re.MULTILINE):
            return f"rank {rank} does not name rank {odd}"
        elif len(re.findall(r"^      at (divergences|bodies)\.py:", outcome.text, re.MULTILINE)) < 2:
            return f"rank {rank} does not name two lines"
    texts = {outcome.text for rank, outcome in enumerate(outcomes) if outcome and rank != odd}
    return "" if len(outcomes) == RANKS and len(texts) == 1 else "ranks tell different stories"


def complaint_about_kill(victim: int, outcomes: Sequence[Outcome | None]) -> str:
    """What is wrong with the outcomes after a rank was killed; empty if nothing is."""
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            if outcome is not None:
                return f"rank {rank} lives"
        elif outcome is None:
            return f"rank {rank} hung or died"
        elif outcome.error != "WatchError":
            return f"rank {rank} raised {outcome.error}: {outcome.text}"
        elif f"rank {victim} is gone" not in outcome.text:
            return f"rank {rank} does not name rank {victim}: {outcome.text}"
    return ""
