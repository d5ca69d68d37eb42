"""Carrying out the plan of a call: redistribute, run on local shards, wrap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from .._torch.ops import schema_of
from ..comm.redistribute import redistribute_local
from ..errors import InputError
from ..sharding.base import DTensorBase
from ..sharding.spec import DTensorSpec
from .arguments import Args, Kwargs, Where, localize
from .call_plan import CallPlan
from .gather_cache import after_write, assign, root_of
from .local_call import copied
from .view_call import ViewCall

T = TypeVar("T")
_copy = torch.ops.aten.copy_.default


def run_call(plan: CallPlan, args: Args, kwargs: Kwargs, kind: type[DTensorBase]) -> object:
    """Run a planned call, and return its results."""
    local_args = [localize(value, how) for value, how in zip(args, plan.args, strict=True)]
    local_kwargs = {name: localize(value, plan.kwargs[name]) for name, value in kwargs.items()}
    if plan.writes:
        return _run_writing(plan, args, kwargs, local_args, local_kwargs)
    result = plan.run_local(*local_args, **local_kwargs)
    if plan.is_view:
        return _wrap_views(plan, result, args, kwargs, kind)
    return _wrapped(result, plan.results, kind)


def _wrapped(result: Any, specs: object, kind: type[DTensorBase]) -> object:
    if type(specs) is DTensorSpec:
        return kind.wrap(result, specs)
    if isinstance(specs, (tuple, list)):
        return type(specs)([_wrapped(r, s, kind) for r, s in zip(result, specs, strict=True)])
    return result


def _wrap_views(plan: CallPlan, result: Any, args: Args, kwargs: Kwargs, kind: type[DTensorBase]) -> object:
    base = args[0]
    shares_memory = plan.local_view and base._source is None
    root = base if shares_memory else base.alias()

    begin = base.storage_offset() * base.dtype.itemsize

    def wrap(piece: Tensor, spec: DTensorSpec, index: int | None) -> object:
        offset = begin // spec.dtype.itemsize + plan.offsets[index or 0]
        replay = None if shares_memory else ViewCall(root, plan.func, args, kwargs, index)
        return kind.wrap_view(piece, spec, base, replay, offset)

    if type(plan.results) is DTensorSpec:
        return wrap(result, plan.results, None)
    return type(plan.results)([wrap(r, s, i) for i, (r, s) in enumerate(zip(result, plan.results, strict=True))])


def _run_writing(plan: CallPlan, args: Args, kwargs: Kwargs, local_args: list[Any], local_kwargs: Kwargs) -> object:
    def at(where: Where, given: Sequence[T], named: dict[str, T]) -> T:
        return given[where] if isinstance(where, int) else named[where]

    if plan.func is _copy and _is_same(args[0], args[1]):
        return args[0]
    if not plan.in_place:
        # The op writes into copies, which are then redistributed to the specs of the targets.
        for where, _ in plan.writes:
            if isinstance(where, int):
                local_args[where] = _copy_of(local_args[where], args[where])
            else:
                local_kwargs[where] = local_kwargs[where].new_empty(0)
    result = plan.run_local(*local_args, **local_kwargs)
    returns = bool(schema_of(plan.func).returns)
    if not returns:
        result = [at(where, local_args, local_kwargs) for where, _ in plan.writes]
    targets = [at(where, args, kwargs) for where, _ in plan.writes]
    if not plan.in_place:
        _copy_results(plan, targets, result)
    for target in targets:
        after_write(target)
    if not returns:
        return None
    return targets[0] if not isinstance(plan.results, (tuple, list)) else type(plan.results)(targets)


def _copy_of(local: Tensor, target: object) -> Tensor:
    """Return a copy to write into, expanded where the target is, so that ops refuse to write it as on one device."""
    return copied(local, target._spec) if isinstance(target, DTensorBase) else local.clone()


def _is_same(one: object, other: object) -> bool:
    """Return whether two tensors are the same elements in memory, so that a copy does nothing."""
    if not isinstance(one, DTensorBase) or not isinstance(other, DTensorBase) or one._spec is not other._spec:
        return False
    return root_of(one) is root_of(other) and one.storage_offset() == other.storage_offset()


def _copy_results(
    plan: CallPlan, targets: list[DTensorBase], result: Tensor | tuple[Tensor, ...] | list[Tensor]
) -> None:
    specs = plan.results if isinstance(plan.results, (tuple, list)) else (plan.results,)
    results = result if isinstance(result, (tuple, list)) else (result,)
    for target, spec, local in zip(targets, specs, results, strict=False):
        if spec.shape != target._spec.shape:
            raise InputError(
                f"{plan.func} would change the shape of {target._spec!r} to {list(spec.shape)}",
                f"write into a tensor of the result's shape, such as x.new_empty({list(spec.shape)})",
            )
        source = spec.with_meta(target._spec.tensor_meta._replace(dtype=spec.dtype))
        goal = target._spec.with_meta(source.tensor_meta)
        assign(target, redistribute_local(local, source, goal))
