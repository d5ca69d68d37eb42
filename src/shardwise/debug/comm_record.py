"""The records of a CommDebugMode: calls of ops and collectives, each with the module and pass it belongs to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from .._torch.ops import OpOverload
from ..ops.trivial import computes_nothing
from ..sharding.placement import Placement
from ..sharding.spec import DTensorSpec
from ..tensor.dtensor import DTensor
from .collectives import public_op
from .module_calls import Moment


class OpCounts(Counter[object]):
    """Numbers by collective, under the op's public name; looking up one of its other names finds it too."""

    def __missing__(self, op: object) -> int:
        return self.get(public_op(op), 0)


@dataclass(frozen=True)
class Operation:
    """One call of an op: the shapes of its tensors, with their specs where they are distributed."""

    op: OpOverload
    inputs: tuple[tuple[tuple[int, ...], DTensorSpec | None], ...]
    moment: Moment

    @property
    def distributed(self) -> bool:
        """Whether the op was called on distributed tensors."""
        return any(spec is not None for _, spec in self.inputs)

    @property
    def trivial(self) -> bool:
        """Whether the op computes nothing: it returns a view or memory without values, or waits."""
        return computes_nothing(self.op)

    def __str__(self) -> str:
        inputs = [repr(spec) if spec is not None else str(list(shape)) for shape, spec in self.inputs]
        return f"{self.op}({', '.join(inputs)})"


@dataclass(frozen=True)
class Collective:
    """One collective: the op as users name it, its kind, its mesh axes, and the bytes that a rank receives."""

    op: object
    kind: str
    over: str
    received: int
    moment: Moment

    def __str__(self) -> str:
        return f"{self.kind} over {self.over}"


@dataclass(frozen=True)
class ModuleRecord:
    """A module that was called: its name, its class, and its own parameters."""

    name: str
    kind: str
    parameters: dict[str, torch.nn.Parameter]

    def placements(self) -> dict[str, tuple[Placement, ...]]:
        """Return the placements of the parameters that are distributed."""
        owned = self.parameters.items()
        return {name: parameter.placements for name, parameter in owned if isinstance(parameter, DTensor)}


def counts(collectives: Iterable[Collective]) -> OpCounts:
    """Return how often each collective was called."""
    return OpCounts(collective.op for collective in collectives)


def received(collectives: Iterable[Collective]) -> OpCounts:
    """Return the bytes that a rank received in each kind of collective."""
    total = OpCounts()
    for collective in collectives:
        total[collective.op] += collective.received
    return total
