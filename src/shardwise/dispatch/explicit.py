"""Explicit mode: an op that needs communication is refused, with the redistribute calls that make it local.

The redistributions that an error names were planned before: with them, this very call needs no communication.

>>> redistributions([("self", spec)], [None], communicates)
['self = self.redistribute(placements=[Replicate()])']
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence

from .._torch import pytree
from ..comm.redistribute import plan_redistribution
from ..errors import CommunicationError, LayoutError, PlacementError
from ..ops.modes import modes
from ..ops.resolve import ResolvedOp
from ..sharding.base import DTensorBase
from ..sharding.from_placements import default_order
from ..sharding.placement import DimAxes, InterleavedShard, P, Partial, Placement, Replicate, Shard
from ..sharding.spec import DTensorSpec
from .arguments import Args, Kwargs, Treatment, named_tensors
from .call_plan import CallPlan
from .list_plan import ListPlan

Specs = list[DTensorSpec]
Plan = Callable[[ResolvedOp, Args, Kwargs], CallPlan | ListPlan | None]


def refuse_communication(
    op: ResolvedOp, args: Args, kwargs: Kwargs, plan: CallPlan | ListPlan, plan_again: Plan
) -> None:
    """Refuse a planned call that communicates, or warn of it."""
    refuse(
        f"{op.func} needs communication in explicit mode ({'; '.join(plan.communication)})",
        "; ".join(_statements(_named_specs(op, args, kwargs), _local_specs(op, args, kwargs, plan, plan_again))),
    )


def changes_for_local_call(
    op: ResolvedOp, args: Args, kwargs: Kwargs, plan: CallPlan | ListPlan | None, plan_again: Plan
) -> list[tuple[str, DTensorBase, str]] | None:
    """Return the operands to redistribute so that a call needs no communication: (name, tensor, placements as code).

    With these placements the call was planned again, and is local. Return None if no such placements were found. `plan`
    is None for a call that runs on gathered inputs.
    """
    found = _local_specs(op, args, kwargs, plan, plan_again)
    if found is None:
        return None
    tensors = [(name, tensor) for name, tensor in named_tensors(op, args, kwargs) if isinstance(tensor, DTensorBase)]
    pairs = zip(tensors, found, strict=True)
    return [(name, tensor, _text(spec)) for (name, tensor), spec in pairs if spec is not tensor._spec]


def _local_specs(
    op: ResolvedOp, args: Args, kwargs: Kwargs, plan: CallPlan | ListPlan | None, plan_again: Plan
) -> Specs | None:
    """Return specs of the distributed arguments with which a call needs no communication; None if none are found."""
    specs = [spec for _, spec in _named_specs(op, args, kwargs)]
    wanted: list[DTensorSpec | None] = [spec.replicated() for spec in specs]
    if plan is not None:
        treatments = [*plan.args, *(plan.kwargs[name] for name in kwargs)]
        wanted = [how if type(how) is DTensorSpec else None for how in _of_tensors(args, kwargs, treatments)]

    def communicates(with_specs: tuple[Args, Kwargs], specs: Specs) -> bool:
        found = None if plan is None else plan_again(op, *with_specs)
        return _needs_gathering(specs) if found is None else bool(found.communication)

    flat, tree = pytree.tree_flatten((args, kwargs))

    def still_communicates(specs: Specs) -> bool:
        left = iter(specs)
        changed = [type(v).wrap(v._local_shard, next(left)) if isinstance(v, DTensorBase) else v for v in flat]
        return communicates(pytree.tree_unflatten(changed, tree), specs)

    return _first_local(specs, wanted, still_communicates)


def refuse_gathering(op: ResolvedOp, args: Args, kwargs: Kwargs) -> None:
    """Refuse a call that runs on gathered inputs, or warn of it, if gathering them needs communication."""
    specs = [spec for _, spec in _named_specs(op, args, kwargs)]
    if not _needs_gathering(specs):
        return
    moving = ", ".join(repr(spec) for spec in specs if _needs_gathering([spec]))
    refuse(
        f"{op.func} runs on gathered inputs, and gathering {moving} needs communication in explicit mode",
        "; ".join(_statements(_named_specs(op, args, kwargs), [spec.replicated() for spec in specs])),
    )


def refuse(problem: str, advice: str) -> None:
    """Raise the error of explicit mode, or warn."""
    error = CommunicationError(problem, f"redistribute first: {advice}")
    if not modes.explicit_warns:
        raise error
    warnings.warn(str(error), UserWarning, stacklevel=4)


def _needs_gathering(specs: Sequence[DTensorSpec]) -> bool:
    """Return whether gathering these needs communication."""
    return any(plan_redistribution(spec, spec.replicated()).plan.collectives for spec in specs)


def _named_specs(op: ResolvedOp, args: Args, kwargs: Kwargs) -> list[tuple[str, DTensorSpec]]:
    named = named_tensors(op, args, kwargs)
    return [(name, tensor._spec) for name, tensor in named if isinstance(tensor, DTensorBase)]


def _of_tensors(args: Args, kwargs: Kwargs, treatments: Sequence[Treatment]) -> list[Treatment]:
    """Return the treatments of the distributed arguments, in the order of `named_tensors`."""
    found: list[Treatment] = []
    for value, how in zip([*args, *kwargs.values()], treatments, strict=True):
        if isinstance(value, DTensorBase):
            found.append(how)
        elif isinstance(value, (list, tuple)):
            hows = how if type(how) in (list, tuple) else [how] * len(value)  # a `Constant` is a tuple of another type
            found += [its for element, its in zip(value, hows, strict=True) if isinstance(element, DTensorBase)]
    return found


# ---- which redistributions would do ---------------------------------------------------------------------------------


def redistributions(
    given: Sequence[tuple[str, DTensorSpec]],
    wanted: Sequence[DTensorSpec | None],
    communicates: Callable[[Specs], bool],
) -> list[str]:
    """Return one statement for each tensor that has to be redistributed.

    `given` are the names and specs of the tensors, `wanted` the specs to which a plan would redistribute them (None for
    those that it leaves alone), and `communicates` returns whether the op would still communicate with given specs.
    """
    return _statements(given, _first_local([spec for _, spec in given], wanted, communicates))


def _first_local(
    specs: Specs, wanted: Sequence[DTensorSpec | None], communicates: Callable[[Specs], bool]
) -> Specs | None:
    aim = [spec if want is None else want for spec, want in zip(specs, wanted, strict=True)]
    return next((candidate for candidate in _candidates(specs, aim) if not communicates(candidate)), None)


def _statements(given: Sequence[tuple[str, DTensorSpec]], chosen: Specs | None) -> list[str]:
    if chosen is None:
        return ["the operands, by x = x.redistribute(placements=[...]), to placements with which this op is local"]
    return [
        f"{name} = {name}.redistribute(placements={_text(new)})"
        for (name, old), new in zip(given, chosen, strict=True)
        if new is not old
    ]


def _candidates(specs: Specs, wanted: Specs) -> Iterator[Specs]:
    """Yield the specs that a plan wants, with more and more axes replicated; then those of the operands likewise."""
    axes = range(len(specs[0].mesh_info.sizes))
    for start in (wanted, specs):
        for count in range(len(axes) + 1):
            for replicated in itertools.combinations(axes, count):
                try:
                    found = [_replicated_on(spec, replicated) for spec in start]
                    for spec in found:
                        _text(spec)
                except (LayoutError, PlacementError):
                    continue
                yield found


def _replicated_on(spec: DTensorSpec, axes: Sequence[int]) -> DTensorSpec:
    if not axes:
        return spec
    left = [Replicate() if axis in axes else placement for axis, placement in enumerate(spec.placements)]
    if left == list(spec.placements):
        return spec
    order = tuple(e._replace(mesh_dims=tuple(a for a in e.mesh_dims if a not in axes)) for e in spec.shard_order)
    return DTensorSpec(spec.mesh, left, spec.tensor_meta, order)


def _text(spec: DTensorSpec) -> str:
    """Return placements as Python code."""
    if spec.shard_order == default_order(spec.placements):
        return f"[{', '.join(map(_placement_text, spec.placements))}]"
    if any(isinstance(placement, InterleavedShard) for placement in spec.placements):
        raise LayoutError(f"{spec!r} is both interleaved and sharded in another order of axes")
    dims: list[DimAxes] = [None] * len(spec.shape)
    names = spec.mesh_info.names
    for dim, axes in spec.shard_order:
        named = tuple(names[axis] for axis in axes)
        dims[dim] = named if len(named) > 1 else named[0]
    partial = {names[a]: p.reduce_op for a, p in enumerate(spec.placements) if isinstance(p, Partial)}
    return repr(P(*dims, partial=partial))


def _placement_text(placement: Placement) -> str:
    if isinstance(placement, Partial):
        return f'Partial("{placement.reduce_op}")'
    return f"Shard({placement.dim})" if type(placement) is Shard else repr(placement)
