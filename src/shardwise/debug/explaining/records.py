"""What `explain` returns: frozen values with plain fields, each with `to_dict()`, so that all of it is JSON.

    Explanation             of a block of code
      communications        list of Communication, in the order in which they began
        line                Line: "train.py:31", with path, number and text; None if there is none
        module, modules     "Model.layers.0.up"; the same with all modules around it, outermost first ("Global")
        op, operand         "aten.mm", "mat2": the call that needed it, and the tensor that was moved for it
        kind, over          "all-gather", ("tp",)
        bytes, seconds      received by a rank; by the cost model
        cause               one of CAUSES: what kind of need it is
        reason              a sentence
        before, after       the specs of the redistribution that it is a step of: "f32[8@tp, 16]"
        chosen, rejected    Choice: what the propagator took for this call, and what it did not, cheapest first
        edit                what to write to avoid it; None if nothing would

A `Choice` says what it does on each axis, which operands it moves (each a `Movement`, with bytes and seconds), and what
it costs in all: moving, communication inside the op, and the later reduction of a result that it leaves Partial.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, fields

from ...sharding.source_lines import Line

CAUSES = {
    "operand": "an op needs an operand in another layout",
    "result": "the result of an op is written into a tensor of another layout",
    "kernel": "an op communicates while it computes",
    "gathered inputs": "an op has no rule, so its inputs are gathered",
    "redistribute": "the program asks for other placements",
    "full_tensor": "the program asks for the global tensor",
    "conversion": "a style converts the input or output of a module",
    "gradient": "a gradient goes back through a redistribution, or to local tensors",
    "leaf gradient": "the gradient of a leaf is redistributed to the leaf's placements",
    "gradient bucket": "gradients of leaves are reduced together",
    "gather parameters": "fully_shard gathers the parameters of a module",
    "reduce gradients": "fully_shard reduces the gradients of a module",
    "experts": "tokens travel to their experts, or back",
    "distribute": "data is sent from one rank to the others",
    "agreement": "ranks check that their random generators agree",
    "transfer": "a model's state is sent to another mesh",
    "erased step": "a recording of a step is run",
    "program": "the program calls a collective itself",
}
"""The causes of communication, each with what it means."""


@dataclass(frozen=True)
class Movement:
    """An operand that a choice redistributes: its name and specs, the bytes that a rank receives, modelled seconds."""

    operand: str
    before: str
    after: str
    bytes: int
    seconds: float

    def to_dict(self) -> dict[str, str | float]:
        """Return the fields as plain values."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


@dataclass(frozen=True)
class Choice:
    """What the mesh axes do in a call, and what that costs by the cost model."""

    axes: tuple[tuple[str, str], ...]
    """What each axis does: `("tp", "shards k")`, `("tp", "leaves sums open")`, `("tp", "is not used")`."""
    moves: tuple[Movement, ...]
    kernel_seconds: float
    """Communication inside the op."""
    later_seconds: float
    """What is charged for reducing a Partial result later, or for redistributing it to the tensor it is written to."""

    @property
    def bytes(self) -> int:
        """The bytes that a rank receives to redistribute operands."""
        return sum(move.bytes for move in self.moves)

    @property
    def seconds(self) -> float:
        """The modelled seconds of everything."""
        return sum(move.seconds for move in self.moves) + self.kernel_seconds + self.later_seconds

    def to_dict(self) -> dict[str, object]:
        """Return the fields as plain values."""
        return {
            "axes": dict(self.axes),
            "moves": [move.to_dict() for move in self.moves],
            "kernel_seconds": self.kernel_seconds,
            "later_seconds": self.later_seconds,
            "bytes": self.bytes,
            "seconds": self.seconds,
        }


@dataclass(frozen=True)
class Communication:
    """One collective, and why it was needed."""

    number: int
    """From 1, in the order in which they began."""
    kind: str
    """The name that plans print: "all-gather", "all-reduce", "reduce-scatter", "all-to-all"; or "broadcast", "send"."""
    collective: str
    """The op's public name, as in the counts of CommDebugMode: "all_gather_into_tensor"."""
    over: tuple[str, ...]
    """The mesh axes; empty for a group that belongs to no mesh."""
    group: str
    """The axes as text; for a group that belongs to no mesh its name, or its number of ranks."""
    ranks: int
    bytes: int
    """Received by a rank; among simulated ranks, the most that any of them receives."""
    seconds: float
    """By the cost model."""
    backward: bool
    recomputing: bool
    """Whether a backward pass recomputes activations."""
    modules: tuple[str, ...]
    line: Line | None
    """The user's line. In a backward pass, the line of the forward pass that recorded the autograd node."""
    cause: str
    op: str | None = None
    rule: str | None = None
    """The rule of the op with the sizes of this call: "m=8 k=16 n=12: m k, k n -> m n ; linear 0 | 1"."""
    operand: str | None = None
    before: str | None = None
    after: str | None = None
    reason: str = ""
    chosen: Choice | None = None
    rejected: tuple[Choice, ...] = ()
    edit: str | None = None

    @property
    def module(self) -> str:
        """The innermost module, by its path; "Global" outside of modules."""
        return self.modules[-1]

    @property
    def phase(self) -> str:
        """ "forward", "backward", or "recomputing"."""
        return "recomputing" if self.recomputing else "backward" if self.backward else "forward"

    def to_dict(self) -> dict[str, object]:
        """Return everything as plain values."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        found["line"] = line_dict(self.line)
        found["module"], found["phase"] = self.module, self.phase
        found["over"], found["modules"] = list(self.over), list(self.modules)
        found["chosen"] = self.chosen.to_dict() if self.chosen is not None else None
        found["rejected"] = [choice.to_dict() for choice in self.rejected]
        return found


@dataclass(frozen=True)
class Total:
    """How much some collectives communicate."""

    count: int = 0
    bytes: int = 0
    seconds: float = 0.0

    @staticmethod
    def of(communications: Iterable[Communication]) -> Total:
        """Return the total of these."""
        all_of_them = list(communications)
        return Total(len(all_of_them), sum(c.bytes for c in all_of_them), sum(c.seconds for c in all_of_them))

    def to_dict(self) -> dict[str, float]:
        """Return the fields as plain values."""
        return {"count": self.count, "bytes": self.bytes, "seconds": self.seconds}


@dataclass
class RecordedExplanation:
    """All communication of a block of code so far: the data of an `Explanation`."""

    communications: list[Communication] = field(default_factory=list)
    mesh_axes: dict[str, int] = field(default_factory=dict)
    """The axes over which something was communicated, with their sizes."""

    @property
    def total(self) -> Total:
        """Return the total of all communication."""
        return Total.of(self.communications)

    def by(self, key: str) -> dict[str, Total]:
        """Return totals by a field: `by("line")`, `by("module")`, `by("kind")`, `by("group")`, `by("cause")`."""
        groups: dict[str, list[Communication]] = {}
        for each in self.communications:
            groups.setdefault(str(getattr(each, key) or ""), []).append(each)
        return {name: Total.of(members) for name, members in groups.items()}

    def to_dict(self) -> dict[str, object]:
        """Return everything as plain values."""
        return {
            "version": 1,
            "total": self.total.to_dict(),
            "axes": dict(self.mesh_axes),
            "communications": [each.to_dict() for each in self.communications],
        }

    def to_json(self, indent: int | None = 2) -> str:
        """Return everything as JSON."""
        return json.dumps(self.to_dict(), indent=indent)


def line_dict(line: Line | None) -> dict[str, str | int] | None:
    """Return a line as plain values: file, number and text."""
    return None if line is None else {"name": str(line), "file": line.path, "number": line.number, "text": line.text}
