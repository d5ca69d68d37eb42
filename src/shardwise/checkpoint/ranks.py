"""The ranks that take part in a checkpoint, and how they agree: processes, simulated ranks, or a single process.

Processes communicate over a gloo group of their own, so that a save in the background cannot be mixed up with the
collectives of the program. A simulated world is one process that holds the data of all its ranks.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from ..errors import CheckpointError, ShardwiseError
from ..sharding.runtime import WorldState, runtime_of_world
from ..world import current_world

T = TypeVar("T")
Answer = TypeVar("Answer")


class Ranks:
    """The ranks of a world with a single process."""

    def __init__(self, size: int = 1) -> None:
        self.size = size
        self.mine: Sequence[int] = range(size)
        """The ranks whose data this process has."""
        self.coordinator = True

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all processes, on every process."""
        return [value]

    def minimum(self, value: int) -> int:
        """Return the minimum over all processes."""
        return value

    def gather(self, value: T) -> list[T]:
        """Return the values of all processes on the coordinator, and an empty list on others."""
        return [value]

    def scatter(self, values: Sequence[T]) -> T:
        """Return the value that the coordinator sends to this process."""
        return values[0]


class ProcessRanks(Ranks):
    """One rank of a world of processes."""

    def __init__(self) -> None:
        super().__init__(dist.get_world_size())
        self.mine = (dist.get_rank(),)
        self.coordinator = dist.get_rank() == 0
        self._group = dist.new_group(backend="gloo")

    def all_gather(self, value: T) -> list[T]:
        found = [value] * self.size
        dist.all_gather_object(found, value, group=self._group)
        return found

    def minimum(self, value: int) -> int:
        least = torch.tensor(value)
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self._group)
        return int(least)

    def gather(self, value: T) -> list[T]:
        found = [value] * self.size if self.coordinator else []
        dist.gather_object(value, found if self.coordinator else None, dst=0, group=self._group)
        return found

    def scatter(self, values: Sequence[T]) -> T:
        found: list[Any] = [None]
        dist.scatter_object_list(found, list(values) if self.coordinator else None, src=0, group=self._group)
        return found[0]


def _ranks() -> Ranks:
    world = current_world()
    return Ranks(world.size) if world is not None else ProcessRanks()


_RANKS = WorldState(_ranks)


def ranks_of_world() -> Ranks:
    """Return the ranks of the present world. In a world of processes the first call is collective: it makes a group."""
    return _RANKS.of(runtime_of_world()) if dist.is_initialized() else Ranks()


# ---- agreement ------------------------------------------------------------------------------------------------------


class _Failure(NamedTuple):
    text: str
    fix: str


def together(ranks: Ranks, what: str, work: Callable[[], T]) -> list[T]:
    """Run `work` on all processes and return all results on each; if one fails, all raise the same error."""
    result, cause = _attempt(work)
    results = _communicated(what, lambda: ranks.all_gather(result))
    failures = {at: found for at, found in enumerate(results) if isinstance(found, _Failure)}
    if failures:
        raise _common_error(what, failures, ranks) from cause
    return results  # type: ignore[return-value]


def agreed(ranks: Ranks, what: str, work: Callable[[], bool]) -> bool:
    """Run `work` on all processes, and return whether it returned True on all; if one fails, all raise the same error.

    Costs an all-reduce of one number, unless there is an error.
    """
    caught: Exception | None = None
    try:
        answer = 2 if work() else 1
    except Exception as error:
        answer, caught = 0, error
    least = _communicated(what, lambda: ranks.minimum(answer))

    def report() -> None:
        if caught is not None:
            raise caught

    if least == 0:
        together(ranks, what, report)
    return least == 2


def on_all(ranks: Ranks, what: str, work: Callable[[], object]) -> None:
    """Run `work` on all processes, and return when all are done. If one fails, all raise the same error."""

    def done() -> bool:
        work()
        return True

    agreed(ranks, what, done)


def through_coordinator(
    ranks: Ranks, what: str, work: Callable[[], T], combine: Callable[[list[T]], Sequence[Answer]]
) -> Answer:
    """Run `work` on all processes, `combine` the results on the coordinator, and return its answer for each process.

    If anything fails anywhere, all raise the same error.
    """
    result, cause = _attempt(work)
    results = _communicated(what, lambda: ranks.gather(result))
    answers: Sequence[Answer | dict[int, _Failure]] = []
    if ranks.coordinator:
        failures = {at: found for at, found in enumerate(results) if isinstance(found, _Failure)}
        try:
            answers = [failures] * len(results) if failures else combine(results)  # type: ignore[arg-type]
        except Exception as error:
            answers, cause = [{0: _failure(error)}] * len(results), error
    answer = _communicated(what, lambda: ranks.scatter(answers))
    if isinstance(answer, dict):
        raise _common_error(what, answer, ranks) from cause
    return answer


def _attempt(work: Callable[[], T]) -> tuple[T | _Failure, Exception | None]:
    """Return the result of `work` and None, or its failure, as sent to other processes, and the error itself."""
    try:
        return work(), None
    except Exception as error:
        return _failure(error), error


def _communicated(what: str, call: Callable[[], T]) -> T:
    try:
        return call()
    except RuntimeError as error:
        lost = f"{what}: another rank died or left ({str(error).splitlines()[0]})"
        raise CheckpointError(lost, "checkpoints that were complete before are intact") from error


def _failure(error: Exception) -> _Failure:
    if isinstance(error, ShardwiseError):
        return _Failure(error.problem, error.fix)
    if isinstance(error, OSError):
        return _Failure(str(error), "")
    return _Failure("".join(traceback.format_exception(error)).rstrip(), "")


def _common_error(what: str, failures: dict[int, _Failure], ranks: Ranks) -> CheckpointError:
    """Return one error for all ranks: each message once, with the ranks it comes from."""
    name_ranks = len(ranks.mine) < ranks.size and len(failures) < ranks.size
    by_text: dict[str, list[int]] = {}
    for rank, failure in failures.items():
        by_text.setdefault(failure.text, []).append(rank)
    lines = [f"rank {', '.join(map(str, at))}: {text}" if name_ranks else text for text, at in by_text.items()]
    fix = next((failure.fix for failure in failures.values() if failure.fix), "")
    return CheckpointError(f"{what}: " + "\n".join(lines), fix)
