"""The errors of the watch, and the text of the log."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Required, TypedDict

from ...errors import WatchError
from .status import Status

ALONE = (
    "Let all ranks make the same calls in the same order. What one rank does alone, such as a log, belongs into "
    "`with shardwise.debug.unwatched():`"
)


class Failure(TypedDict, total=False):
    """A problem as ranks publish it: its kind, and the fields of that kind."""

    kind: Required[Literal["raised", "gone", "deadlock", "differs"]]

    rank: int  # of one that raised an error
    error: str
    line: str

    ranks: list[int]  # those that are gone

    statuses: dict[str, dict[str, Any]]  # of a deadlock: those of all ranks

    stream: str  # in which two ranks differ
    by: int
    other: int
    agreed: int


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks as text: `rank 3`, or `ranks 0, 2-5`."""
    ordered = sorted(ranks)
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
    return f"{'rank' if len(ordered) == 1 else 'ranks'} {text}"


def disagreement(index: int, ranks: Sequence[int], events: Mapping[int, Mapping[str, str | None]]) -> WatchError:
    """Return the error of ranks that did different things at one position of their stream."""
    by_text: dict[str, list[int]] = defaultdict(list)
    for rank in ranks:
        by_text[_event_text(events.get(rank))].append(rank)
    groups = sorted(by_text.items(), key=lambda item: (len(item[1]), item[1]))
    lines = [f"  {ranks_text(who)}: {text}" for text, who in groups]
    few = groups[0][1] if len(groups) > 1 else []
    problem = f"{ranks_text(ranks)} disagree about call {index + 1} of those they make together:\n" + "\n".join(lines)
    return WatchError(problem, ALONE, tuple(few))


def _event_text(event: Mapping[str, str | None] | None) -> str:
    if event is None:
        return "no answer"
    if event["what"] is None:
        return f"has not got that far; it is\n      at {event['line']}"
    return f"{event['what']}\n      at {event['line']}" if event["line"] else event["what"]


def raised(failure: Failure) -> WatchError:
    """Return the error of the other ranks when one rank raised an error of its own."""
    rank = failure["rank"]
    problem = f"rank {rank} raised {failure['error']}\n      at {failure['line']}"
    fix = f"All ranks stop, since the others would wait for rank {rank}; its traceback is in its own output"
    return WatchError(problem, fix, (rank,))


def gone(ranks: Sequence[int], why: str = "") -> WatchError:
    """Return the error when ranks have ended without publishing an error."""
    verb = "is" if len(ranks) == 1 else "are"
    problem = f"{ranks_text(ranks)} {verb} gone: {why or 'the process was killed, or has ended without an error'}"
    return WatchError(problem, "Look for its last output, and for the kernel's out-of-memory killer", tuple(ranks))


def deadlock(statuses: Mapping[int, Status]) -> WatchError:
    """Return the error when all ranks wait, each for ranks that wait for something else."""
    problem = "all ranks wait for each other, in collectives that not all ranks of their groups have begun:\n"
    return WatchError(problem + waiting(statuses), ALONE, tuple(statuses))


def waiting(statuses: Mapping[int, Status]) -> str:
    """Return where each rank is: `rank 0: waiting in all_reduce ... at train.py:31`."""
    by_text: dict[str, list[int]] = defaultdict(list)
    for rank, status in statuses.items():
        doing = f"{'waiting in' if status.waits else 'in its own code after'} {status.doing or 'no collective'}"
        by_text[f"{doing}\n      at {status.line or 'a line that changes'}"].append(rank)
    return "\n".join(f"  {ranks_text(ranks)}: {text}" for text, ranks in sorted(by_text.items(), key=lambda i: i[1]))
