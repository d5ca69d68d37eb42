"""Plans: how one layout becomes another, as pure data that prints.

A step names its kind, the mesh axes whose ranks communicate, and the layouts before and after it; nothing else is
needed to carry it out on any rank.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch

from ..sharding.layout import Layout
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

    `op` is the reduction of an all-reduce or reduce-scatter.
    """

    kind: str
    axes: tuple[int, ...]
    before: Layout
    after: Layout
    received: float
    op: str = ""


@dataclass(frozen=True)
class Plan:
    """The steps from one layout to another and the modelled seconds they take."""

    source: Layout
    target: Layout
    steps: tuple[Step, ...]
    seconds: float

    @property
    def received(self) -> float:
        """Bytes that a rank receives."""
        return sum(step.received for step in self.steps)

    @property
    def collectives(self) -> int:
        """The number of steps that communicate."""
        return sum(1 for step in self.steps if step.axes)

    def text(self, dtype: torch.dtype, names: tuple[str, ...]) -> str:
        """The plan as readable lines, with the most bytes that any rank receives."""
        received = [received_exactly(step, dtype.itemsize) for step in self.steps]
        lines = [
            f"{spec_text(self.source, dtype, names)} -> {spec_text(self.target, dtype, names)}   "
            f"{_count(self.collectives, 'collective')}, {bytes_text(sum(received))} received by a rank"
        ]
        for number, step in enumerate(self.steps, 1):
            over = f"over {names_text([names[axis] for axis in step.axes])}" if step.axes else "locally"
            kind = f"{step.kind} ({step.op})" if step.op else step.kind
            after = spec_text(step.after, dtype, names)
            lines.append(f"  {number}. {kind:<20} {over:<16} {bytes_text(received[number - 1]):>9}   {after}")
        return "\n".join(lines)


@dataclass(frozen=True)
class SpecPlan:
    """A plan between two specs. Prints as the steps, with the axis names of their mesh."""

    source: DTensorSpec
    target: DTensorSpec
    plan: Plan

    def __str__(self) -> str:
        return self.plan.text(self.source.dtype, self.source.mesh_info.names)


_MANY_RANKS = 4096


def received_exactly(step: Step, itemsize: int) -> float:
    """The most bytes that any rank receives in a step. `step.received` takes uneven shards for even ones."""
    mesh_sizes = step.before.mesh_sizes
    peers = math.prod(mesh_sizes[axis] for axis in step.axes)
    if step.kind == ALL_REDUCE:
        return 2 * step.before.max_local_numel() * itemsize * (peers - 1) / peers
    if step.kind == REDUCE_SCATTER:
        return step.after.max_local_numel() * itemsize * (peers - 1)
    if not step.axes or math.prod(mesh_sizes) > _MANY_RANKS:
        return step.received
    lacking = 0
    for at in itertools.product(*map(range, mesh_sizes)):
        present = volume(intersection(step.before.runs(at), step.after.runs(at)))
        lacking = max(lacking, math.prod(step.after.local_shape(at)) - present)
    return lacking * itemsize


def bytes_text(count: float) -> str:
    """A number of bytes with a unit: `192 B`, `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.3g} {unit}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
