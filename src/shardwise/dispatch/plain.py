"""Plain tensors among distributed ones.

A plain tensor with dims may differ from rank to rank, so it is an error unless it is known to be replicated, or has no
data that could differ. Then it becomes a replicated DTensor, of which the op takes the shard that it needs.

A plain tensor of one element, also an expanded one, is a number, and may meet distributed tensors. A distributed tensor
without dims that meets tensors of another mesh, or plain ones, is reduced and passed as a plain number: the norm of
gradients that live on several meshes is such a value.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .._torch import pytree
from .._torch.ops import schema_of
from ..errors import MixedTensorError
from ..ops.replicated import as_replicated, gathered
from ..ops.resolve import ResolvedOp
from ..sharding.base import DTensorBase
from ..world import RankTensor
from ..world.agreement import same
from .arguments import Args, Kwargs, named_tensors, replace_tensors, written_arguments
from .explicit import refuse
from .modes import modes
from .provenance import takes_plain_as_replicated


def with_replicas(op: ResolvedOp, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
    """Return the arguments with plain tensors as replicated DTensors; None if no plain tensor meets a DTensor.

    Tensors that are written stay plain. Raises MixedTensorError for a tensor that is not known to be replicated.
    """
    if op.op.takes_plain:
        return None
    named = list(named_tensors(op, args, kwargs))
    if all(isinstance(tensor, DTensorBase) or not tensor.dim() for _, tensor in named):
        return None
    written, meets = written_arguments(op, args, kwargs), _partners(op, named)
    replicas: dict[str, DTensorBase] = {}
    for name, tensor in named:
        if not is_plain(tensor) or (like := meets(name)) is None:
            continue
        if op.variant == "out" and tensor in written and not tensor.numel():
            continue  # an empty `out=` gets the global result, on all ranks
        nothing = not tensor.numel() and tensor.shape == like.shape  # the gradient of a vector that `cat` skips
        if not (nothing or tensor.is_meta or _is_number(tensor) or takes_plain_as_replicated() or _is_index(op, name)):
            raise mixed_tensors(op, name, tensor)
        if tensor not in written and name not in op.op.updates:
            _check_same_on_ranks(op, name, tensor)
            replicas[name] = as_replicated(tensor, like)
    if not replicas:
        return None
    return replace_tensors(op, args, kwargs, replicas)


def _partners(op: ResolvedOp, named: list[tuple[str, Tensor]]) -> Callable[[str], DTensorBase | None]:
    """Return a function from an argument to a distributed tensor that it is combined with.

    In an op on lists, elements meet those at the same index, on their mesh; there may be plain ones at all of them. A
    tensor that all elements share (a scale, numbers for each element) is the same on all ranks.
    """
    distributed = [(name, tensor) for name, tensor in named if isinstance(tensor, DTensorBase)]
    if op.variant != "foreach":
        return lambda name: distributed[0][1]
    by_index: dict[str, DTensorBase] = {}
    for name, tensor in distributed:
        by_index.setdefault(name.partition("[")[2], tensor)  # "" for a tensor that all elements share
    return lambda name: by_index.get(name.partition("[")[2], by_index.get("")) if "[" in name else None


def is_plain(tensor: Tensor) -> bool:
    """Return whether this is a plain tensor with dims."""
    return not isinstance(tensor, DTensorBase) and tensor.dim() > 0


def _is_number(tensor: Tensor) -> bool:
    """Return whether a tensor holds one element, which may be expanded.

    `x[2:4] = torch.zeros(1)` writes such a tensor.
    """
    return all(size == 1 or not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def mixed_tensors(op: ResolvedOp, name: str, tensor: Tensor) -> MixedTensorError:
    """Return the error for a plain tensor that is not known to be replicated."""
    return MixedTensorError(
        f"{op.func} mixes distributed tensors with a plain tensor of shape {list(tensor.shape)}, its argument {name!r}",
        "make it one with distribute_tensor(tensor, mesh, placements) or DTensor.from_local(...), or take "
        "plain tensors as replicated inside `with shardwise.experimental.implicit_replication():`",
    )


def _check_same_on_ranks(op: ResolvedOp, name: str, tensor: Tensor) -> None:
    """Raise if a tensor is not replicated. A process sees only its own values; simulated ranks can be compared."""
    if isinstance(tensor, RankTensor) and not same(tensor.shards):
        raise MixedTensorError(
            f"{op.func} takes a plain tensor of shape {list(tensor.shape)}, its argument {name!r}, as replicated, but "
            "its values differ between ranks",
            "make it a distributed one with DTensor.from_local(tensor, mesh, placements)",
        )


def _is_index(op: ResolvedOp, name: str) -> bool:
    """Return whether an argument is in a list of indices.

    PyTorch makes a plain tensor of a Python list: `x[[0, 2]]`.
    """
    argument = schema_of(op.func).arguments[op.names.index(name.partition("[")[0])]
    return str(argument.type) == "List[Optional[Tensor]]"


# ---- numbers ------------------------------------------------------------------------------------------------------


def with_numbers(op: ResolvedOp, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
    """Return the arguments with 0-dim distributed tensors as plain ones.

    Return None if there are none, or if one requires a gradient, which would have to go back to its mesh.
    """
    flat, tree = pytree.tree_flatten((args, kwargs))
    if torch.is_grad_enabled() and any(isinstance(value, Tensor) and value.requires_grad for value in flat):
        return None
    written = written_arguments(op, args, kwargs)
    plain = [
        _number(value) if isinstance(value, DTensorBase) and not value.dim() and value not in written else value
        for value in flat
    ]
    if all(new is old for new, old in zip(plain, flat, strict=True)):
        return None
    found: tuple[Args, Kwargs] = pytree.tree_unflatten(plain, tree)
    return found


def _number(tensor: DTensorBase) -> object:
    spec = tensor._spec
    if modes.explicit and spec.layout.partial:
        refuse(
            f"{spec!r} meets tensors that are not on its mesh, so it must be reduced, in explicit mode",
            "x = x.redistribute(placements=[Replicate(), ...])",
        )
    local = gathered(tensor)
    return local.shards[0] if isinstance(local, RankTensor) and same(local.shards) else local
