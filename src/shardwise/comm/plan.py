"""Plans: the steps from one layout to another, as data that prints.

A step names its kind, the mesh axes whose ranks communicate, and the layouts before and after it; nothing else is
needed to carry it out on any rank.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch

from ..sharding.drawn import Drawn
from ..sharding.layout import Factor, Layout, Sizes, divides_evenly, factor_range
from ..sharding.mesh import names_text
from ..sharding.spec import DTensorSpec
from ..sharding.spec_text import spec_text
from .boxes import intersection, volume

# Kinds of steps. The local ones have no axes.
SLICE = "slice"
TO_PARTIAL = "to partial"
ALL_GATHER = "all-gather"
ALL_TO_ALL = "all-to-all"
EXCHANGE = "exchange"
ALL_REDUCE = "all-reduce"
REDUCE_SCATTER = "reduce-scatter"


@dataclass(frozen=True)
class Step:
    """One step: its kind, the axes of its group, the layouts around it, and the bytes a rank receives.

    `op` is the reduction of an all-reduce or reduce-scatter, or of an exchange that replaces one. `seconds` is the time
    by the cost model.
    """

    kind: str
    axes: tuple[int, ...]
    before: Layout
    after: Layout
    received: float
    op: str = ""
    seconds: float = 0.0

    @property
    def divisor(self) -> int:
        """What the sum is divided by, if the step also averages over some of its axes; else 1."""
        if self.op != "sum":
            return 1
        averaged = [axis for axis, op in self.before.partial if op == "avg" and axis in self.axes]
        return math.prod(self.before.mesh_sizes[axis] for axis in averaged)

    @property
    def is_padded(self) -> bool:
        """Whether this is a native collective in which some rank's piece is padded to the size of the largest."""
        if self.kind not in (ALL_GATHER, REDUCE_SCATTER):
            return False
        sizes = self.before.mesh_sizes
        return any(_differs(sizes, factor, self.axes) for dim in pieces_of(self).dims for factor in dim)

    def label(self) -> str:
        """Return the kind with the reduction, such as `all-reduce (sum)`."""
        if not self.op:
            return self.kind
        return f"{self.kind} ({self.op}{f' / {self.divisor}' if self.divisor > 1 else ''})"


def pieces_of(step: Step) -> Layout:
    """Return the layout whose shards are the pieces of an all-gather or a reduce-scatter."""
    return step.before if step.kind == ALL_GATHER else step.after


def least_piece(step: Step) -> int:
    """Return the number of elements of the smallest piece in the group whose first rank has the largest."""
    layout = pieces_of(step)
    last = tuple(size - 1 if axis in step.axes else 0 for axis, size in enumerate(layout.mesh_sizes))
    return math.prod(layout.local_shape(last))


def _differs(sizes: Sizes, factor: Factor, axes: tuple[int, ...]) -> bool:
    """Return whether ranks that differ only on these axes may hold pieces of different sizes of a factor."""
    if divides_evenly(sizes, factor) or not set(factor.axes) & set(axes):
        return False
    others = [axis for axis in factor.axes if axis not in axes]
    for indices in itertools.product(*(range(sizes[axis]) for axis in others)):
        at = dict(zip(others, indices, strict=True))
        # Along each axis pieces become smaller, so the first and the last rank have the largest and the smallest.
        first = factor_range(sizes, factor, tuple(at.get(axis, 0) for axis in range(len(sizes))))
        last = factor_range(sizes, factor, tuple(at.get(axis, size - 1) for axis, size in enumerate(sizes)))
        if first[1] - first[0] != last[1] - last[0]:
            return True
    return False


@dataclass(frozen=True)
class Plan:
    """The steps from one layout to another, and their time by the cost model."""

    source: Layout
    target: Layout
    steps: tuple[Step, ...]
    seconds: float

    @property
    def received(self) -> float:
        """The bytes that a rank receives. Uneven shards may be counted as even ones."""
        return sum(step.received for step in self.steps)

    @property
    def collectives(self) -> int:
        """The number of steps that communicate."""
        return sum(1 for step in self.steps if step.axes)

    def text(self, dtype: torch.dtype, names: tuple[str, ...]) -> str:
        """Return the plan as lines, with the most bytes that any rank receives in each step."""
        received = [received_exactly(step, dtype.itemsize) for step in self.steps]
        lines = [
            f"{spec_text(self.source, dtype, names)} -> {spec_text(self.target, dtype, names)}   "
            f"{_count(self.collectives, 'collective')}, {bytes_text(sum(received))} received by a rank"
        ]
        for number, step in enumerate(self.steps, 1):
            over = f"over {names_text([names[axis] for axis in step.axes])}" if step.axes else "locally"
            after = spec_text(step.after, dtype, names) + ("   padded" if step.is_padded else "")
            lines.append(f"  {number}. {step.label():<20} {over:<16} {bytes_text(received[number - 1]):>9}   {after}")
        return "\n".join(lines)


@dataclass(frozen=True)
class SpecPlan(Drawn):
    """A plan between two specs. Prints its steps, with the axis names of their mesh."""

    source: DTensorSpec
    target: DTensorSpec
    plan: Plan

    def __str__(self) -> str:
        return self.plan.text(self.source.dtype, self.source.mesh_info.names)


_MANY_RANKS = 4096


def received_exactly(step: Step, itemsize: int) -> float:
    """Return the most bytes that any rank receives in a step. `step.received` may count uneven shards as even ones.

    On more than 4096 ranks an all-to-all or an exchange without a reduction is not counted exactly.
    """
    mesh_sizes = step.before.mesh_sizes
    peers = math.prod(mesh_sizes[axis] for axis in step.axes)
    if step.kind == ALL_REDUCE:
        return 2 * step.before.max_local_numel() * itemsize * (peers - 1) / peers
    if step.kind in (ALL_GATHER, REDUCE_SCATTER):  # with the pad
        return pieces_of(step).max_local_numel() * itemsize * (peers - 1)
    if step.kind == EXCHANGE and step.op:  # the operands of all peers
        return step.after.max_local_numel() * itemsize * (peers - 1)
    if not step.axes or math.prod(mesh_sizes) > _MANY_RANKS:
        return step.received
    lacking = 0
    for at in itertools.product(*map(range, mesh_sizes)):
        present = volume(intersection(step.before.runs(at), step.after.runs(at)))
        lacking = max(lacking, math.prod(step.after.local_shape(at)) - present)
    return lacking * itemsize


def seconds_text(seconds: float) -> str:
    """Return a time with a unit: `501 µs`, `1.25 s`."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale or unit == "µs":
            break
    return f"{seconds / scale:.0f} {unit}" if seconds >= 100 * scale else f"{seconds / scale:.3g} {unit}"


def bytes_text(count: float) -> str:
    """Return a number of bytes with a unit: `192 B`, `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.3g} {unit}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
