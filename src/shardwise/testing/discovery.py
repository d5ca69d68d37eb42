"""`discover` finds the rule of an op by trying it: it splits sample inputs and compares how the results combine.

>>> print(discover(torch.ops.mylib.scale_rows.default, [(torch.randn(5, 4), torch.randn(5))]))
a b, a -> a b

Probing can refute a rule but not prove it: see `split_dims` for what is tried. A rule that it finds is verified like
any other before it is returned. It takes seconds, and runs in a child process, since some ops crash on slices of
their inputs. It is for authors of rules; dispatch never uses it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from .._torch import pytree
from .._torch.ops import OpOverload
from ..errors import InputError
from ..ops.call import Call
from ..ops.generated import Line
from ..ops.registry import register
from ..ops.schema import overload_key
from .calls import Failure, try_call
from .children import Lost, in_children
from .lines import Group, kind_of, lines_of, reductions_agree
from .passing import refuted
from .probe_call import ProbeCall
from .recording import Recorded
from .split_dims import factors_of

MESHES = ((2,), (3,), (2, 2))
KINDS = 60  # kinds of calls of one op that are tried
SAMPLES = 3  # calls of one kind


@dataclass(frozen=True)
class Discovered:
    """The rule of an op: lines for some or all of its calls. Register it with `register_sharding(found.op, found)`.

    >>> found = discover(torch.ops.mylib.scale_rows.default, [(torch.randn(5, 4), torch.randn(5))])
    >>> shardwise.register_sharding(found.op, found)
    """

    op: OpOverload
    lines: tuple[Line, ...]
    problem: str = ""
    """Why there is no line."""

    def __call__(self, call: Call) -> str | None:
        """Return the rule of a call; None if no line fits it."""
        return next((line.rule for line in self.lines if line.fits(call)), None)

    def __bool__(self) -> bool:
        return bool(self.lines)

    def __str__(self) -> str:
        if not self.lines:
            return f"no rule: {self.problem}"
        return "\n".join(str(line).partition(" ")[2].removeprefix(": ") for line in self.lines)


def discover(
    op: OpOverload,
    samples: Iterable[Sequence[object]],
    *,
    passing: str = "",
    seed: int = 0,
    seconds: float = 120.0,
) -> Discovered:
    """Find the rule of an op from sample calls: tuples of arguments, or pairs of such a tuple and keyword arguments.

    Give samples of all numbers of dims, dtypes and options that the rule must fit; sizes do not matter. Which operands
    may stay Partial is not discovered: pass `passing="linear 0 | 1"`, which probing tries to refute.

    >>> print(discover(torch.ops.mylib.scale_rows.default, [(torch.randn(5, 4), torch.randn(5))]))
    a b, a -> a b
    """
    calls = [_call(op, sample) for sample in samples]
    if not calls:
        raise InputError(f"no samples of {op}", "pass at least one call, as a tuple of arguments")
    for gentle in (False, True):
        work = functools.partial(found_lines, calls, passing, seed, gentle)
        ((_, answer),) = in_children({op: work}, count=1, seconds=seconds)
        if answer != Lost("crash"):
            break
    if isinstance(answer, Lost):
        return Discovered(op, (), answer.reason)
    lines, problem = answer
    return Discovered(op, tuple(lines), problem)


def _call(op: OpOverload, sample: Sequence[object]) -> Recorded:
    own = pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), tuple(sample))
    if len(own) == 2 and isinstance(own[0], (tuple, list)) and isinstance(own[1], dict):
        return Recorded(op, tuple(own[0]), own[1])
    return Recorded(op, own, {})


# ---- in the child ---------------------------------------------------------------------------------------------------


def found_lines(calls: Sequence[Recorded], passing: str, seed: int, gentle: bool = False) -> tuple[list[Line], str]:
    """Return the lines for an op's calls, or why there are none. Registers rules: run it in a child process."""
    op = calls[0].func
    groups = _groups(calls, seed, gentle)
    lines = lines_of(overload_key(op), groups)
    if not groups:
        return [], "no sample has a result to look at"
    if not lines:
        return [], "no dim can be sharded"
    if passing:
        wrong = refuted([setup for group in groups for setup in group.calls], passing, seed)
        if wrong:
            return [], wrong
        lines = [line._replace(rule=f"{line.rule} ; {passing}") for line in lines]
    cases, failures = _checked(op, lines, calls)
    if failures:
        return [], f"{failures[0].kind} when checked: {failures[0].text}"
    return (lines, "") if cases else ([], "no call could be checked; perhaps the op has no meta kernel")


def _groups(calls: Sequence[Recorded], seed: int, gentle: bool) -> list[Group]:
    kinds: dict[str, list[ProbeCall]] = {}
    for call in calls:
        setup = ProbeCall(call)
        kinds.setdefault(repr(kind_of(setup)), []).append(setup)
    groups = []
    for setups in list(kinds.values())[:KINDS]:
        tried = [
            (setup, splits) for setup in setups[:SAMPLES] if (splits := factors_of(setup, seed, gentle)) is not None
        ]
        if not tried:
            continue
        every = dict.fromkeys(split for _, splits in tried for split in splits)
        common = [
            split
            for split in every
            if all(split in splits or setup.size(*split.dims[0]) == 1 for setup, splits in tried)
        ]
        while not reductions_agree(common):
            common.pop()
        groups.append(Group(setups[:SAMPLES], common, *kind_of(setups[0])))
    return groups


def _checked(op: OpOverload, lines: Sequence[Line], calls: Sequence[Recorded]) -> tuple[int, list[Failure]]:
    """Try each call with the placements that the lines allow."""
    register(op, Discovered(op, tuple(lines)))
    cases = 0
    for call, mesh in itertools.product(calls, MESHES):
        tried = try_call(call, mesh, limit=8)
        cases += tried.cases
        if tried.failures:
            return cases, tried.failures
    return cases, []
