"""Calls without a rule: decomposed into other ops, or run on gathered inputs.

On gathered inputs every rank computes the same result, and what the op writes in place is written back to the local
shards. That is always right and rarely fast, so the first such call of an op warns.
"""

from __future__ import annotations

import itertools
import warnings

from torch import Tensor

from .._torch import pytree
from .._torch.decompositions import registered_decomposition
from ..comm.redistribute import redistribute_local
from ..errors import CommunicationError, InputError
from ..ops.op import Never
from ..ops.replicated import as_replicated, gathered
from ..ops.resolve import ResolvedOp
from ..ops.served import served_by
from ..sharding.base import DTensorBase
from .arguments import Args, Kwargs, Written, distributed, plain_target_error, written_arguments
from .explicit import refuse_gathering
from .gather_cache import after_write
from .into_out import run_into_out
from .modes import modes
from .outside import returns_tensors, run_outside
from .view_call import ViewCall


class GatherWarning(UserWarning):
    """An op has no rule: its inputs were gathered and every rank computed all of it."""


def run_without_plan(op: ResolvedOp, args: Args, kwargs: Kwargs, kind: type[DTensorBase], outside: bool) -> object:
    """Return the result of a call without a rule. `outside` is whether this rank is not in the mesh."""
    if outside and not returns_tensors(op):
        return run_outside(op, args, kwargs, kind)
    if op.decomposition is not None and (result := op.decomposition(*args, **kwargs)) is not NotImplemented:
        return result
    if op.variant == "out" and (result := run_into_out(op, args, kwargs)) is not NotImplemented:
        return result
    if op.in_place_view is not None:
        args[0].data = op.in_place_view(*args, **kwargs)
        return args[0]
    decomposed = op.func.decompose(*args, **kwargs)
    if decomposed is not NotImplemented:
        return decomposed
    if (registered := registered_decomposition(op.func)) is not None:
        return registered(*args, **kwargs)
    if outside:
        return run_outside(op, args, kwargs, kind)
    if not isinstance(op.op.rule, Never) and served_by(op.func) != "rule" and not op.needs_data:
        _warn_of_gathering(op, args, kwargs)
    return _run_on_gathered(op, args, kwargs, kind)


def refuse_collective(op: ResolvedOp, args: Args, kwargs: Kwargs) -> None:
    """Raise an error: a collective takes local tensors, not a DTensor."""
    raise InputError(
        f"{op.func} communicates local tensors between ranks, and was called with the DTensor {_specs(args, kwargs)}",
        "pass x.to_local(), or use x.redistribute. Stages of a pipeline pass local tensors on: use_local_output=True "
        "in the last style",
    )


def _specs(args: Args, kwargs: Kwargs) -> str:
    """Return the specs of the first distributed arguments as text."""
    found = distributed(args, kwargs)
    return ", ".join([repr(tensor._spec) for tensor in found[:3]] + ["..."] * (len(found) > 3))


def _warn_of_gathering(op: ResolvedOp, args: Args, kwargs: Kwargs) -> None:
    """Warn once that an op runs on gathered inputs, or refuse it under strict_ops."""
    advice = (
        f'give it a rule: shardwise.register_sharding(torch.ops.{op.func}, "..."); '
        f"shardwise.testing.discover(torch.ops.{op.func}, [(...)]) finds one from sample arguments"
    )
    if modes.strict_ops:
        raise CommunicationError(f"{op.func} of {_specs(args, kwargs)} has no rule, and strict_ops is on", advice)
    if not op.warned:
        op.warned = True
        problem = f"{op.func} has no rule: it runs on gathered inputs, the same on every rank"
        warnings.warn(f"{problem}; {advice}", GatherWarning, stacklevel=2)


def _run_on_gathered(op: ResolvedOp, args: Args, kwargs: Kwargs, kind: type[DTensorBase]) -> object:
    written = written_arguments(op, args, kwargs)
    for tensor in written:
        if not isinstance(tensor, DTensorBase):
            specs = [tensor._spec for tensor in distributed(args, kwargs)]
            raise plain_target_error(op.func, getattr(tensor, "shape", ()), specs)
    if modes.explicit:
        refuse_gathering(op, args, kwargs)
    tensors = distributed(args, kwargs)
    inputs = {id(tensor): _gathered_input(tensor, writable=tensor in written) for tensor in tensors}
    flat, tree = pytree.tree_flatten((args, kwargs))
    local_args, local_kwargs = pytree.tree_unflatten([inputs.get(id(value), value) for value in flat], tree)
    result = op.func(*local_args, **local_kwargs)
    _write_back(op, written, inputs)
    returned = {id(inputs[id(tensor)]): tensor for tensor in written}
    position = itertools.count()
    root = args[0].alias() if op.is_view else tensors[0]

    def wrap(local: Tensor) -> object:
        if id(local) in returned:
            return returned[id(local)]
        made = as_replicated(local, tensors[0])
        if not op.is_view:
            return made
        index = None if isinstance(result, Tensor) else next(position)
        replay = ViewCall(root, op.func, args, kwargs, index)
        return kind.wrap_view(made._local_shard, made._spec, args[0], replay, 0)

    return pytree.tree_map_only(Tensor, wrap, result)


def _gathered_input(tensor: DTensorBase, writable: bool) -> Tensor:
    local = gathered(tensor)
    return local.clone() if writable and local is tensor._local_shard else local


def _write_back(op: ResolvedOp, written: Written, inputs: dict[int, Tensor]) -> None:
    """Write the gathered inputs that the op has written back to the local shards of the arguments."""
    for tensor in written:
        new, spec = inputs[id(tensor)], tensor._spec
        if new.shape != spec.shape:
            raise InputError(
                f"{op.func} would change the shape of {spec!r} to {list(new.shape)}",
                "call the op without out=, or its variant without an underscore at the end, which returns a new tensor",
            )
        tensor._local_shard.copy_(redistribute_local(new, spec.replicated(), spec))
        after_write(tensor)
