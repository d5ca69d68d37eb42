"""Carrying out the plan of an op on lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .._torch.ops import schema_of
from ..comm.redistribute import redistribute_local
from ..sharding.base import DTensorBase
from ..world import common
from .arguments import Args, Kwargs, Where, localize
from .gather_cache import after_source_writes
from .list_plan import ListPlan

ByPlace = dict[Where, Any]
"""Arguments of a call, by position and name."""


def run_list(plan: ListPlan, args: Args, kwargs: Kwargs, kind: type[DTensorBase]) -> list[object] | None:
    """Run a planned op on lists, and return its results; None if it returns nothing."""
    given: ByPlace = dict(enumerate(args))
    given.update(kwargs)
    hows: dict[Where, object] = dict(enumerate(plan.args))
    hows.update(plan.kwargs)
    local = {where: localize(value, hows[where]) for where, value in given.items()}
    for where, index, _, _ in plan.moved:
        local[where][index] = local[where][index].clone()
    results: list[Any] = [None] * plan.length
    for indices, run in plan.groups:
        here = local if len(indices) == plan.length else _picked(plan, local, indices)
        found = run(*(here[i] for i in range(len(args))), **{name: here[name] for name in kwargs})
        if isinstance(found, dict):
            for name, value in found.items():
                _argument_named(plan, args, kwargs, name).copy_(common(value))
        elif plan.results is not None:
            for index, value in zip(indices, found, strict=True):
                results[index] = value
    _write_back(plan, given, local)
    if plan.results is None:
        return None
    return [x if spec is None else kind.wrap(x, spec) for x, spec in zip(results, plan.results, strict=True)]


def _write_back(plan: ListPlan, given: ByPlace, local: ByPlace) -> None:
    for where, index, source, target in plan.moved:
        given[where][index]._local_shard.copy_(redistribute_local(local[where][index], source, target))
    for where in plan.writes:
        after_source_writes(given[where])


def _picked(plan: ListPlan, local: ByPlace, indices: Sequence[int]) -> ByPlace:
    """Return the arguments with these elements of their lists."""
    return {
        where: [value[i] for i in indices] if where in plan.lists and len(value) else value
        for where, value in local.items()
    }


def _argument_named(plan: ListPlan, args: Args, kwargs: Kwargs, name: str) -> Tensor:
    names = [argument.name for argument in schema_of(plan.func).arguments]
    found: Tensor = kwargs[name] if name in kwargs else args[names.index(name)]
    return found
