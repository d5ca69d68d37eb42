"""Many programs, by seed, in child processes; failures are shrunk there."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from ...world import simulate
from ..children import Lost, in_children
from .compare import Failure
from .generate import generate, mesh_of
from .program import Program
from .shrink import shrink
from .sides import Distributed
from .trial import alone, trial

TOGETHER = 250  # programs in one world, which share its cached plans
SECONDS = 300.0  # for that many


class Report(NamedTuple):
    """A failure, with the shrunk program; `history` are the seeds of the programs that must run before it."""

    seed: int
    failure: Failure
    program: Program
    history: tuple[int, ...] = ()


class Answer(NamedTuple):
    """The result of a child: how many programs it ran, and which failed."""

    programs: int
    reports: list[Report]


def batches(seeds: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the seeds in groups of programs whose worlds have the same size."""
    by_size: dict[int, list[int]] = {}
    for seed in seeds:
        by_size.setdefault(math.prod(mesh_of(seed)), []).append(seed)
    return [tuple(some[i : i + TOGETHER]) for some in by_size.values() for i in range(0, len(some), TOGETHER)]


def run_all(seeds: Sequence[int], ignored: Sequence[str] = (), jobs: int = 1) -> Iterator[Answer]:
    """Run the programs with these seeds, `jobs` batches at a time; yields answers as they are ready."""
    waiting = batches(seeds)
    while waiting:
        work = {batch: partial(run_batch, batch, ignored) for batch in waiting}
        waiting = []
        for batch, answer in in_children(work, jobs, SECONDS):
            if not isinstance(answer, Lost):
                yield answer
            elif len(batch) > 1:  # find the program that crashes
                waiting += [batch[: len(batch) // 2], batch[len(batch) // 2 :]]
            else:
                yield _lost(batch[0], ignored, answer)


def _lost(seed: int, ignored: Sequence[str], lost: Lost) -> Answer:
    """Return the answer for a program whose child crashed or ran out of time.

    The cause may be the program, a smaller one tried while shrinking, or its generation. All that runs here may crash
    again, so it runs in children, too.
    """
    [(_, answer)] = in_children({seed: partial(run_batch, (seed,), ignored, shrinking=False)}, 1, SECONDS)
    if not isinstance(answer, Lost):
        return answer  # a smaller program crashes
    [(_, program)] = in_children({seed: partial(generate, seed)}, 1, SECONDS)
    if isinstance(program, Lost):
        failure = Failure("crash", "the generator, on plain tensors", program.reason)
        return Answer(1, [Report(seed, failure, Program(seed, mesh_of(seed), ()))])
    return Answer(1, [Report(seed, Failure("crash", "the process", lost.reason), program)])


def run_batch(seeds: Sequence[int], ignored: Sequence[str] = (), shrinking: bool = True) -> Answer:
    """Run programs in one simulated world."""
    failed: list[tuple[Program, Failure]] = []
    with simulate(math.prod(mesh_of(seeds[0]))):
        side = Distributed()
        for seed in seeds:
            program = generate(seed)
            failure = trial(program, side, ignored)
            if failure is not None:
                failed.append((program, failure))
    reports = [_report(program, failure, seeds, ignored, shrinking) for program, failure in failed]
    return Answer(len(seeds), reports)


def _report(
    program: Program, failure: Failure, seeds: Sequence[int], ignored: Sequence[str], shrinking: bool
) -> Report:
    if not shrinking:
        return Report(program.seed, failure, program)
    if alone(program, ignored) is None:
        before = tuple(seeds[: list(seeds).index(program.seed)])
        return Report(program.seed, failure, program, _needed(program, before, ignored))
    smallest, found = shrink(program, failure, lambda smaller: alone(smaller, ignored))
    return Report(program.seed, found, smallest)


def _needed(program: Program, before: tuple[int, ...], ignored: Sequence[str]) -> tuple[int, ...]:
    """Return a few programs that make this one fail if they run before it in the same world."""
    while len(before) > 1:
        half = len(before) // 2
        for part in (before[half:], before[:half]):
            if _fails_after(part, program, ignored):
                before = part
                break
        else:
            return before
    return before


def _fails_after(seeds: Sequence[int], program: Program, ignored: Sequence[str]) -> bool:
    with simulate(math.prod(program.mesh)):
        side = Distributed()
        for seed in seeds:
            trial(generate(seed), side, ignored)
        return trial(program, side, ignored) is not None
