"""Why a call of an op, or a function of shardwise, communicates: derived from the call, not from cached plans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from ..._torch.ops import OpOverload
from ...comm.plan import received_exactly
from ...comm.redistribute import plan_redistribution
from ...dispatch.arguments import Args, Kwargs, named_tensors
from ...dispatch.choices import CallChoices, OperandMove, PricedChoice, choices_of
from ...dispatch.explicit import changes_for_local_call
from ...dispatch.gather_cache import is_weight
from ...dispatch.key import argument_keys
from ...errors import ShardwiseError
from ...ops.registry import resolve
from ...sharding.spec import DTensorSpec
from ...tensor.dtensor import DTensor
from . import reasons
from .names import Names
from .purposes import Purpose
from .records import Choice, Communication, Movement

_MOST_REJECTED = 6

SpecPair = tuple[DTensorSpec, DTensorSpec]


class OpCall:
    """A running call of an op on distributed tensors."""

    def __init__(self, func: OpOverload, args: Args, kwargs: Kwargs, node: int) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.node = node
        """The number of its autograd node, if it has one."""
        self.seen: list[OperandMove] = []
        """The operands that were redistributed so far."""


def leaves_among(args: Args, kwargs: Kwargs) -> Iterator[Tensor]:
    """Yield the leaves among the arguments of an op that get a gradient."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, DTensor) and value.requires_grad and is_weight(value):
            yield value


class _Derived(NamedTuple):
    """What explains all calls with the same op and specs."""

    choices: CallChoices | None
    records: tuple[Choice, ...]
    """The choice that was taken, then rejected ones, cheapest first."""
    changes: list[tuple[int, str, str]] | None
    """Operands to redistribute before the call: position among its tensors, name, placements as code."""


class Reasoning:
    """Derives the reasons of communication. What depends on op and specs alone is derived once."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], _Derived] = {}
        self._key = argument_keys(DTensor)

    # ---- ops ------------------------------------------------------------------------------------------------------

    def of_call(self, sent: Communication, call: OpCall, pair: SpecPair | None, names: Names) -> Communication:
        """Return a communication of an op with its reason filled in."""
        known = self._known_of(call)
        op = str(call.func).removesuffix(".default")
        edit = self._edit(call, known, names)
        sent = replace(sent, op=op, edit=edit)
        if known.choices is not None:
            called = {m.name: names.of(self._tensor(call, m), m.name) for m in self._all_moves(known.choices)}
            chosen, *rejected = (_renamed(choice, called) for choice in known.records)
            sent = replace(sent, rule=known.choices.rule, chosen=chosen, rejected=tuple(rejected))
        if pair is None:
            return replace(sent, cause="kernel", reason=reasons.of_kernel(sent, op))
        if known.choices is None:
            operand = self._with_spec(call, pair[0], names)
            return replace(
                sent, cause="gathered inputs", operand=operand, reason=reasons.of_gathering(sent, op, operand)
            )
        move = self._move(call, known.choices, pair)
        if move is None:
            return replace(sent, cause="result", reason=reasons.of_result(sent, op))
        operand = called[move.name]
        return replace(sent, cause="operand", operand=operand, reason=reasons.of_operand(sent, op, move, operand))

    def _known_of(self, call: OpCall) -> _Derived:
        key = (id(call.func), *map(self._key, call.args), *call.kwargs, *map(self._key, call.kwargs.values()))
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._derive(call)
        return found

    def _derive(self, call: OpCall) -> _Derived:
        op = resolve(call.func)
        try:
            choices = choices_of(op, call.args, call.kwargs)
            plan = DTensor._op_dispatcher.plan(op, call.args, call.kwargs)
            changed = changes_for_local_call(op, call.args, call.kwargs, plan, DTensor._op_dispatcher.plan)
        except ShardwiseError:  # tensors of different meshes, say: the call itself has the better error
            return _Derived(None, (), None)
        tensors = [tensor for _, tensor in named_tensors(op, call.args, call.kwargs)]
        changes = None
        if changed is not None:
            where = {id(tensor): index for index, tensor in enumerate(tensors)}
            changes = [(where[id(tensor)], name, text) for name, tensor, text in changed]
        if choices is None:
            return _Derived(None, (), changes)
        records = tuple(map(_as_record, (choices.chosen, *choices.rejected[:_MOST_REJECTED])))
        return _Derived(choices, records, changes)

    @staticmethod
    def _move(call: OpCall, choices: CallChoices, pair: SpecPair) -> OperandMove | None:
        """Return the operand of the chosen plan that this redistribution moves."""
        for move in choices.chosen.moves:
            same = move.before is pair[0] and move.after.layout is pair[1].layout
            if same and not any(move is seen for seen in call.seen):
                call.seen.append(move)
                return move
        return next((m for m in choices.chosen.moves if m.before is pair[0] and m.after.layout is pair[1].layout), None)

    @staticmethod
    def _all_moves(choices: CallChoices) -> Iterator[OperandMove]:
        for choice in (choices.chosen, *choices.rejected):
            yield from choice.moves

    @staticmethod
    def _tensor(call: OpCall, move: OperandMove) -> Tensor:
        where, index = move.place
        value = call.args[where] if isinstance(where, int) else call.kwargs[where]
        found: Tensor = value if index is None else value[index]
        return found

    @staticmethod
    def _with_spec(call: OpCall, spec: DTensorSpec, names: Names) -> str | None:
        for name, tensor in named_tensors(resolve(call.func), call.args, call.kwargs):
            if isinstance(tensor, DTensor) and tensor._spec is spec:
                return names.of(tensor, name)
        return None

    @staticmethod
    def _edit(call: OpCall, known: _Derived, names: Names) -> str | None:
        if not known.changes:
            return None
        tensors = [tensor for _, tensor in named_tensors(resolve(call.func), call.args, call.kwargs)]
        return "\n".join(
            reasons.edit_of_operand(tensors[at], name, text, call.func, names) for at, name, text in known.changes
        )

    # ---- functions of shardwise -----------------------------------------------------------------------------------

    @staticmethod
    def of_purpose(sent: Communication, purpose: Purpose | None, pair: SpecPair | None, names: Names) -> Communication:
        """Return a communication of a function of shardwise, or of the program, with its reason filled in."""
        if purpose is None:
            cause = "program" if pair is None else "gradient" if sent.backward else "redistribute"
            purpose = Purpose(cause)
        leaves = [names.of_leaf(leaf, f"a leaf {leaf._spec!r}") for leaf in _distributed_leaves(purpose)]
        operand = ", ".join(leaves) or None
        reason, edit = reasons.of_purpose(sent, purpose, leaves)
        return replace(sent, cause=purpose.cause, operand=operand, reason=reason, edit=edit)


def _distributed_leaves(purpose: Purpose) -> list[DTensor]:
    return [leaf for leaf in purpose.leaves if isinstance(leaf, DTensor)]


def _as_record(choice: PricedChoice) -> Choice:
    """Return a choice as plain values, with the bytes of its moves."""
    moves = []
    for move in choice.moves:
        steps = plan_redistribution(move.before, move.after).plan.steps
        received = sum(received_exactly(step, move.before.dtype.itemsize) for step in steps if step.axes)
        moves.append(Movement(move.name, repr(move.before), repr(move.after), int(received), move.seconds))
    return Choice(choice.axes, tuple(moves), choice.kernel, choice.later)


def _renamed(choice: Choice, called: Mapping[str, str]) -> Choice:
    """Return a choice in which operands have the names that the user gave them."""
    return replace(choice, moves=tuple(replace(move, operand=called[move.operand]) for move in choice.moves))
