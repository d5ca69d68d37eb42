"""Calls on a rank that is not in the mesh of their tensors: results have a spec and an empty local shard.

Such a rank may run the same program as the ranks of the mesh. It plans each call as the first rank of the mesh does,
for the specs of the results, and runs nothing. Only random ops draw, and drop the numbers, so that the generators of
all ranks advance alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch import pytree
from .._torch.fake_tensors import on_meta
from .._torch.ops import schema_of
from ..comm.on_ranks import shard_outside
from ..errors import MeshError
from ..ops.resolve import ResolvedOp
from ..sharding.base import DTensorBase
from ..sharding.mesh import MeshInfo
from ..sharding.placement import Replicate
from ..sharding.spec import DTensorSpec, contiguous_meta
from .arguments import LOCALIZE, Args, Kwargs, Treatment, distributed
from .call_plan import CallPlan
from .list_plan import ListPlan
from .local_code import LocalRun


def plan_outside(op: ResolvedOp, plan: CallPlan | ListPlan, args: Args, kwargs: Kwargs) -> CallPlan | ListPlan:
    """Return the plan of a call for a rank outside the mesh."""
    _, device = _mesh_and_device(args, kwargs)
    treated: dict[str, Any] = {
        "args": tuple(map(_unmoved, plan.args)),
        "kwargs": {name: _unmoved(how) for name, how in plan.kwargs.items()},
        "communication": (),
    }
    if isinstance(plan, ListPlan):
        made = None if plan.results is None else list(plan.results)
        everything = ((tuple(range(plan.length)), _nothing(op, made, device)),)
        return plan._replace(**treated, moved=(), groups=everything)
    run = _nothing(op, plan.results, device)
    if op.op.draw is not None:
        run = _drawing(plan, args, kwargs, run)
    return plan._replace(**treated, run_local=run, in_place=True, is_view=False, local_view=False)


def _unmoved(how: Treatment) -> Treatment:
    """Return a treatment with redistributions replaced by LOCALIZE."""
    if isinstance(how, list):
        return [_unmoved(each) for each in how]
    return LOCALIZE if type(how) is DTensorSpec else how


def _nothing(op: ResolvedOp, specs: object, device: torch.device) -> LocalRun:
    """Return local code that ignores its arguments and returns empty local shards for these specs."""

    def empty(spec: DTensorSpec) -> Tensor:
        return shard_outside(spec.ndim, spec.dtype, device)

    if specs is None and op.returns:
        answer = _without_tensors(op)
        return lambda *args, **kwargs: answer()
    return lambda *args, **kwargs: pytree.tree_map_only(DTensorSpec, empty, specs)


def _without_tensors(op: ResolvedOp) -> Callable[[], object]:
    """Return a function that returns the result of an op that returns no tensor, or raises an error."""
    if str(schema_of(op.func).returns[0].type) == "bool":
        return lambda: True  # `equal` and the like are true of tensors without elements

    def refuse() -> object:
        raise _outside_error(op, "the rank holds none of its data")

    return refuse


def _drawing(plan: CallPlan, args: Args, kwargs: Kwargs, then: LocalRun) -> LocalRun:
    """Return local code that draws what the first rank of the mesh draws, drops it, and returns `then(...)`."""

    def held(value: object, how: Treatment) -> tuple[tuple[int, ...], torch.dtype] | None:
        """Return shape and dtype of the first rank's local shard; None for arguments that are no DTensors."""
        spec = how if type(how) is DTensorSpec else value._spec if isinstance(value, DTensorBase) else None
        return None if spec is None else (spec.local_shape(spec.mesh_info.coordinate), spec.dtype)

    given = [held(value, how) for value, how in zip(args, plan.args, strict=True)]
    named = {name: held(value, plan.kwargs[name]) for name, value in kwargs.items()}

    def zeros(value: Any, like: tuple[tuple[int, ...], torch.dtype] | None) -> object:
        return value if like is None else torch.zeros(like[0], dtype=like[1], device=value.device)

    def run(*args: object, **kwargs: object) -> object:
        plan.run_local(
            *map(zeros, args, given), **{name: zeros(value, named.get(name)) for name, value in kwargs.items()}
        )
        return then(*args, **kwargs)

    return run


def run_outside(op: ResolvedOp, args: Args, kwargs: Kwargs, kind: type[DTensorBase]) -> object:
    """Return the result of a call that no rule takes, with the shapes that the op gives for meta tensors."""
    if not returns_tensors(op):
        return _without_tensors(op)()
    mesh_info, device = _mesh_and_device(args, kwargs)
    flat, tree = pytree.tree_flatten((args, kwargs))
    bare = [on_meta(value) if isinstance(value, Tensor) else value for value in flat]
    given = {id(meta): value for meta, value in zip(bare, flat, strict=True) if isinstance(value, Tensor)}
    meta_args, meta_kwargs = pytree.tree_unflatten(bare, tree)
    try:
        result = op.func(*meta_args, **meta_kwargs)
    except NotImplementedError:
        raise _outside_error(op, "the shape of its result depends on data") from None

    def wrap(meta: Tensor) -> object:
        if id(meta) in given:  # it was written
            return given[id(meta)]
        replicated = (Replicate(),) * len(mesh_info.sizes)
        spec = DTensorSpec(mesh_info.mesh, replicated, contiguous_meta(meta.shape, meta.dtype))
        return kind.wrap(shard_outside(spec.ndim, spec.dtype, device), spec)

    return pytree.tree_map_only(Tensor, wrap, result)


def returns_tensors(op: ResolvedOp) -> bool:
    """Return whether all results of an op are tensors; also for an op that returns nothing."""
    return all("Tensor" in str(result.type) for result in schema_of(op.func).returns)


def is_outside(args: Args, kwargs: Kwargs) -> bool:
    """Return whether this rank is in none of the meshes of the distributed tensors."""
    first = next((value for value in args if isinstance(value, DTensorBase)), None)
    if first is not None and not first._spec.mesh_info.outside:
        return False
    return all(tensor._spec.mesh_info.outside for tensor in distributed(args, kwargs))


def _mesh_and_device(args: Args, kwargs: Kwargs) -> tuple[MeshInfo, torch.device]:
    tensor = distributed(args, kwargs)[0]
    return tensor._spec.mesh_info, tensor.device


def _outside_error(op: ResolvedOp, reason: str) -> MeshError:
    return MeshError(
        f"{op.func} on rank {dist.get_rank()}, which is not in the mesh of the tensor: {reason}",
        "call it on the ranks of the mesh only: if mesh.get_coordinate() is not None: ...",
    )
