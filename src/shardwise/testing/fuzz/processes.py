"""Programs on four gloo processes, compared bit by bit with the simulated world.

Every rank runs all programs of a batch and returns its errors, and the spec and local shard of each variable. The
simulated world must have the same errors, specs and bits on that rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from ...tensor.dtensor import DTensor
from ...world import collectives, shards_of, simulate
from ..children import Lost, in_children, meeting_file, store_at
from .batch import Answer, Report
from .compare import Failure, close
from .draw import GLOO_MESHES
from .generate import generate
from .outcome import Outcome, Seen, run
from .program import Program
from .sides import Distributed

Order = tuple[int, ...] | tuple[tuple[int, ...], ...]

RANKS = 4
ORDERS: tuple[Order, ...] = ((0, 1, 2, 3), (3, 2, 1, 0), (1, 2, 3, 0), ((0, 1), (2, 3)), ((0, 2), (1, 3)))
"""Orders of sums over ranks, tried to find results that depend on it. `((0, 1), (2, 3))` sums each pair first."""
TOGETHER = 50  # programs that one set of processes runs
TIMEOUT = timedelta(seconds=30)  # for one collective
SECONDS = 900.0  # for a batch


class Held(NamedTuple):
    """The spec and local shard of a variable on one rank."""

    spec: str
    shard: Tensor


class Found(NamedTuple):
    """The outcome of a program on one rank: types of errors by line, and variables."""

    errors: dict[int, str]
    held: dict[str, object]


def run_on_gloo(seeds: Sequence[int]) -> Iterator[Answer]:
    """Run programs on four processes; yields an answer for each batch.

    A program in which ranks wait for each other in vain ends its batch: new processes run those that follow it.
    """
    start = 0
    while start < len(seeds):
        programs = [generate(seed, GLOO_MESHES) for seed in seeds[start : start + TOGETHER]]
        answer = compare_with_processes(programs)
        yield answer
        start += answer.programs


def compare_with_processes(programs: Sequence[Program]) -> Answer:
    """Return which programs have another outcome on four processes than in the simulated world.

    It counts the programs up to the first after which the processes could not go on.
    """
    with meeting_file() as path:
        ranks = {rank: partial(run_rank, rank, path, programs) for rank in range(RANKS)}
        answers = dict(in_children(ranks, RANKS, SECONDS))
    found: dict[int, list[Found]] = {}
    for rank, answer in sorted(answers.items()):
        if isinstance(answer, Lost):
            failure = Failure("crash", f"rank {rank}", answer.reason)
            return Answer(len(programs), [Report(programs[0].seed, failure, programs[0])])
        found[rank] = answer
    done = min(map(len, found.values()))
    simulated = simulate_ranks(programs[:done])
    reports = []
    for index, program in enumerate(programs[:done]):
        if raised_by_some(simulated[index][0], [found[rank][index] for rank in range(RANKS)]):
            continue
        for rank in range(RANKS):
            difference = compared(program, rank, simulated[index][rank], found[rank][index])
            if difference:
                reports.append(Report(program.seed, Failure("value", f"rank {rank}", difference), program))
                break
    return Answer(done, reports)


def raised_by_some(simulated: Found, found: Sequence[Found]) -> bool:
    """Return whether some ranks raise the errors of the simulated world, and others do not.

    An error that the data of one rank causes, such as an integer division by zero, is raised on that rank alone unless
    `debug.watch` is on. Simulated ranks run as one, so that it is raised for all of them.
    """
    raised = {line: error for each in found for line, error in each.errors.items()}
    return raised == simulated.errors and any(each.errors != simulated.errors for each in found)


def compare_rank(programs: Sequence[Program]) -> None:
    """Run programs as one of four processes; raises AssertionError if this rank differs from the simulated one."""
    found = [_on_rank(outcome, 0) for outcome in _outcomes(programs, Distributed())]
    rank = dist.get_rank()
    simulated = simulate_ranks(programs)
    for index, program in enumerate(programs):
        difference = compared(program, rank, simulated[index][rank], found[index])
        assert not difference, program.script(difference)


def simulate_ranks(programs: Sequence[Program], order: Order = ORDERS[0]) -> list[list[Found]]:
    """Return the outcome of each program on each rank of the simulated world, with reductions in this order."""
    with simulate(RANKS), _reducing_in(order):
        side = Distributed()
        return [[_on_rank(outcome, rank) for rank in range(RANKS)] for outcome in _outcomes(programs, side)]


def _reducing_in(order: Order) -> AbstractContextManager[object]:
    reduce = collectives._reduce

    def reordered(tensors: Sequence[Tensor], op: str) -> Tensor:
        if len(tensors) != RANKS:
            return reduce(tensors, op)
        first = [p if isinstance(p, int) else [tensors[q] for q in p] for p in order]
        return reduce([tensors[p] if isinstance(p, int) else reduce(p, op) for p in first], op)

    return mock.patch.object(collectives, "_reduce", reordered)


def run_rank(rank: int, path: str, programs: Sequence[Program]) -> list[Found]:
    """Run programs as one of the processes, up to the first that breaks the connection to the others."""
    store = store_at(path, 2 * TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=TIMEOUT)
    found = []
    for outcome in _outcomes(programs, Distributed()):
        found.append(_on_rank(outcome, 0))
        errors = [*outcome.errors.values(), *outcome.seen.values()]
        if any(isinstance(error, RuntimeError) and "gloo/transport" in str(error) for error in errors):
            break
    return found


def _outcomes(programs: Sequence[Program], side: Distributed) -> Iterator[Outcome]:
    for program in programs:
        side.use(program.mesh)
        yield run(program, side, _held_value)


def _held_value(x: Tensor) -> object:
    """Return the local shards of a tensor: of all ranks if they are simulated."""
    if not isinstance(x, DTensor):
        return f"a {type(x).__name__} that is not distributed"
    with torch.no_grad():
        local = x.to_local()
    return [Held(repr(x.spec), shard.detach().clone()) for shard in shards_of(local)]


def _on_rank(outcome: Outcome, index: int) -> Found:
    """Return an outcome as one rank has it."""

    def of_rank(value: object) -> object:
        if isinstance(value, list) and value and isinstance(value[0], Held):
            return value[index]
        assert not isinstance(value, Seen)
        return f"{type(value).__name__}: {value}" if isinstance(value, Exception) else value

    errors = {line: type(error).__name__ for line, error in outcome.errors.items()}
    return Found(errors, {name: of_rank(value) for name, value in outcome.seen.items()})


def compared(program: Program, rank: int, simulated: Found, found: Found) -> str:
    """Return how a rank differs from the simulated one; if it does, the program is simulated in other orders first."""
    if not different([simulated], found):
        return ""
    others = [simulate_ranks([program], order)[0][rank] for order in ORDERS[1:]]
    return different([simulated, *others], found)


def different(simulated: Sequence[Found], found: Found) -> str:
    """Return how the outcome on a process differs from the simulated ones; "" if it does not.

    A result that is the same bits in all simulated orders of reduction must have these bits. One that depends on the
    order (PyTorch does not say in which gloo reduces) must be close.
    """
    first = simulated[0]
    if first.errors != found.errors:
        return f"errors {first.errors} simulated, {found.errors} on processes"
    for name, wanted in first.held.items():
        have = found.held.get(name)
        others = [other.held.get(name) for other in simulated[1:]]
        if isinstance(wanted, Held) and isinstance(have, Held):
            if wanted.spec != have.spec:
                return f"{name} is {wanted.spec} simulated, {have.spec} on processes"
            ordered = any(not isinstance(o, Held) or not same_bits(wanted.shard, o.shard) for o in others)
            if not same_bits(wanted.shard, have.shard) and not (ordered and close(have.shard, wanted.shard)):
                return f"{name} is {wanted.shard.tolist()} simulated, {have.shard.tolist()} on processes"
        elif repr(wanted) != repr(have) and all(repr(wanted) == repr(other) for other in others):
            return f"{name} is {wanted!r} simulated, {have!r} on processes"
    return ""


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same shape, strides and bits; one NaN is as good as another."""
    if (one.shape, one.stride(), one.dtype) != (other.shape, other.stride(), other.dtype):
        return False
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True) if one.numel() else True
