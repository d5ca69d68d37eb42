"""What a CommDebugMode writes down: calls of ops and collectives, each with its place in the program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from .._torch.ops import OpOverload
from ..sharding.placement import Placement
from ..sharding.spec import DTensorSpec
from ..tensor.dtensor import DTensor
from .collectives import public_op
from .module_calls import Moment


class OpCounts(Counter[Any]):
    """Numbers by collective. An op counts under its public name, and is found by its other names too."""

    def __missing__(self, op: Any) -> int:
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
        """Whether the op computes nothing: it makes a view or empty memory, or waits."""
        schema = self.op._schema
        views = any(result.alias_info is not None and not result.alias_info.is_write for result in schema.returns)
        return views or schema.name in _TRIVIAL

    def __str__(self) -> str:
        inputs = [repr(spec) if spec is not None else str(list(shape)) for shape, spec in self.inputs]
        return f"{self.op}({', '.join(inputs)})"


_TRIVIAL = {
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
    "_c10d_functional::wait_tensor",
    "_c10d_functional::_wrap_tensor_autograd",
}


@dataclass(frozen=True)
class Collective:
    """One collective: the op as users name it, what it is, over which mesh axes, and the bytes that a rank receives."""

    op: Any
    kind: str
    over: str
    received: int
    moment: Moment

    def __str__(self) -> str:
        return f"{self.kind} over {self.over}"


@dataclass(frozen=True)
class ModuleRecord:
    """A module that was called: its class, and the parameters that it owns itself."""

    name: str
    kind: str
    parameters: dict[str, torch.nn.Parameter]

    def placements(self) -> dict[str, tuple[Placement, ...]]:
        """The placements of the parameters that are distributed."""
        owned = self.parameters.items()
        return {name: parameter.placements for name, parameter in owned if isinstance(parameter, DTensor)}


def counts(collectives: Iterable[Collective]) -> OpCounts:
    """How often each collective was called."""
    return OpCounts(collective.op for collective in collectives)


def received(collectives: Iterable[Collective]) -> OpCounts:
    """The bytes that each collective brought to a rank."""
    total = OpCounts()
    for collective in collectives:
        total[collective.op] += collective.received
    return total
