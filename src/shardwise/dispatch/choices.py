"""The choice that the propagator made for a call, and those it rejected. Computed anew, also if the plan is cached.

>>> found = choices_of(op, args, kwargs)
>>> found.chosen.moves
(OperandMove(name='mat2', place=(1, None), before=f32[16@tp, 8], after=f32[16, 8], seconds=0.0005),)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..notation import Bound, Passing
from ..ops.resolve import ResolvedOp
from ..sharding.layout import Layout
from ..sharding.mesh import MeshInfo
from ..sharding.spec import DTensorSpec
from .arguments import Args, Argument, Kwargs, Where, as_argument, common_mesh, distributed
from .bind_call import BoundCall, Place, bind_call
from .call_plan import propagator_of
from .decision import Operand, Option, PriceParts
from .propagate import ShardingPropagator
from .result_meta import NoRule

_MANY = 256  # up to so many combinations of options, all are priced


class OperandMove(NamedTuple):
    """An operand that a choice redistributes, and the propagator's price of that."""

    name: str
    place: Place
    before: DTensorSpec
    after: DTensorSpec
    seconds: float
    lost: tuple[tuple[str, str], ...]
    """(axis, factor) for each axis that no longer shards the same dim, (axis, reduce op) for each that is no longer
    Partial: `(("tp", "k"), ("dp", "sum"))`."""


class PricedChoice(NamedTuple):
    """What each mesh axis does in a choice, and the summands of its price."""

    axes: tuple[tuple[str, str], ...]
    """What each axis with several options does: `(("dp", "is not used"), ("tp", "shards k"))`."""
    moves: tuple[OperandMove, ...]
    kernel: float
    """Seconds of the collectives inside the op."""
    later: float
    """Seconds to reduce or redistribute the results later."""

    @property
    def seconds(self) -> float:
        """The price of the choice."""
        return sum(move.seconds for move in self.moves) + self.kernel + self.later


class CallChoices(NamedTuple):
    """The choice that the propagator makes for a call, and the others, cheapest first."""

    chosen: PricedChoice
    rejected: tuple[PricedChoice, ...]
    rule: str
    """The rule, with the sizes of this call."""


def choices_of(op: ResolvedOp, args: Args, kwargs: Kwargs) -> CallChoices | None:
    """Return the choices of a call, or None if it has no rule or is an op on lists."""
    if not op.has_rule or op.variant == "foreach" or op.op.takes_plain or op.in_place_view is not None:
        return None
    mesh_info = common_mesh(op.func, distributed(args, kwargs))
    arguments = [as_argument(value) for value in args]
    named = {name: as_argument(value) for name, value in kwargs.items()}
    try:
        found = bind_call(op, arguments, named, mesh_info)
    except NoRule:
        return None
    propagator = propagator_of(found, mesh_info)
    chosen = propagator.cheapest()
    free = [axis for axis in range(len(mesh_info.sizes)) if len(propagator.options_of(axis)) > 1]

    def described(parts: PriceParts) -> PricedChoice:
        values = dict(zip([*range(len(arguments)), *named], [*arguments, *named.values()], strict=True))
        return _described(parts, found, values, free, mesh_info)

    parts = propagator.parts(chosen)
    assert parts is not None
    others = sorted((p for p in _others(propagator, chosen) if p is not None), key=lambda p: p.seconds)
    choices = [described(parts), *map(described, others)]
    distinct = list({(choice.moves, choice.kernel, choice.later): choice for choice in reversed(choices)}.values())
    return CallChoices(choices[0], tuple(c for c in reversed(distinct) if c is not choices[0]), str(found.bound))


def _others(propagator: ShardingPropagator, chosen: tuple[Option, ...]) -> list[PriceParts | None]:
    """Return the prices of all other choices if there are few, otherwise of those that differ on one axis."""
    options = [propagator.options_of(axis) for axis in range(len(propagator.mesh_sizes))]
    if math.prod(map(len, options)) <= _MANY:
        others = list(itertools.product(*options))
    else:
        changed = ((axis, option) for axis, choices in enumerate(options) for option in choices)
        others = [(*chosen[:axis], option, *chosen[axis + 1 :]) for axis, option in changed]
    return [propagator.parts(choice) for choice in others if choice != chosen]


def _described(
    parts: PriceParts, found: BoundCall, values: Mapping[Where, object], free: Sequence[int], mesh_info: MeshInfo
) -> PricedChoice:
    moves = []
    for place, operand, (layout, seconds) in zip(found.places, found.operands, parts.operands, strict=True):
        value = values[place[0]]
        argument = value[place[1]] if place[1] is not None and isinstance(value, list) else value
        if layout is operand.layout or not isinstance(argument, Argument) or argument.spec is None:
            continue
        after = DTensorSpec.from_layout(mesh_info, layout, argument.meta)
        lost = _lost(operand, layout, found.bound, mesh_info.names)
        moves.append(OperandMove(_name(found, place), place, argument.spec, after, seconds, lost))
    actions = [(mesh_info.names[axis], _action(parts.options[axis], found)) for axis in free]
    return PricedChoice(tuple(actions), tuple(moves), parts.kernel, parts.later)


def _lost(operand: Operand, after: Layout, bound: Bound, names: Sequence[str]) -> tuple[tuple[str, str], ...]:
    found = [(names[axis], op) for axis, op in operand.layout.partial if (axis, op) not in after.partial]
    for i, (dim, mine, new) in enumerate(zip(operand.layout.dims, operand.tensor.dims, after.dims, strict=True)):
        kept = {axis for factor in new for axis in factor.axes}
        name = " ".join(bound.factors[index].name for index in mine) or f"dim {i}"
        found += [(names[axis], name) for factor in dim for axis in factor.axes if axis not in kept]
    return tuple(found)


def _name(found: BoundCall, place: Place) -> str:
    where, index = place
    name = found.resolved.names[where] if isinstance(where, int) else where
    return name if index is None else f"{name}[{index}]"


def _action(option: Option, found: BoundCall) -> str:
    """Return the text of what an axis does: `shards k`."""
    if option is None:
        return "is not used"
    if isinstance(option, Passing):
        return f"leaves {'sums' if option.op in ('sum', 'avg') else option.op} open"
    return f"shards {found.bound.factors[option].name}"
