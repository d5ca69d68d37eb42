"""Writes of distributed values into plain tensors: the values are gathered, and every rank writes all of them.

>>> cache = torch.zeros(2, 8, 16)                      # plain, the same on all ranks
>>> with implicit_replication():
...     cache[:, 3] = x                                # x is gathered first
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import Node

from .._torch import pytree
from ..ops.replicated import as_replicated, gathered
from ..ops.resolve import ResolvedOp
from ..sharding.base import DTensorBase
from .arguments import Args, Kwargs, Written, named_tensors, replace_tensors, written_arguments
from .explicit import refuse_gathering
from .formulas import Gradients, Recorded, hold, hold_result, mark_formula_of_plain
from .modes import modes
from .provenance import takes_plain_as_replicated


def write_gathered(op: ResolvedOp, args: Args, kwargs: Kwargs) -> object:
    """Run a call that writes distributed values into plain tensors; NotImplemented for any other call.

    The plain tensors must be known to be replicated, or have no dims and no gradient. In an op on lists, elements are
    written from those at the same index.
    """
    written = written_arguments(op, args, kwargs)
    named = list(named_tensors(op, args, kwargs))
    needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for _, tensor in named)
    targets = {
        name: tensor
        for name, tensor in named
        if not isinstance(tensor, DTensorBase)
        and tensor in written
        and (takes_plain_as_replicated() or not (tensor.dim() or needs_grad))
    }
    if not targets:
        return NotImplemented
    by_index = op.variant == "foreach"
    indices = {_index(name) for name in targets}
    sources = {
        name: tensor
        for name, tensor in named
        if isinstance(tensor, DTensorBase)
        and tensor not in written
        and (not by_index or _index(name) in indices or not (_index(name) or tensor.dim()))  # a number is for all
    }
    if not sources or (not by_index and any(isinstance(tensor, DTensorBase) for tensor in written)):
        return NotImplemented
    if modes.explicit:
        refuse_gathering(op, args, kwargs)
    values = {name: gathered(tensor) for name, tensor in sources.items()}
    new_args, new_kwargs = replace_tensors(op, args, kwargs, values)
    like = next(iter(sources.values()))
    result = pytree.tree_map_only(Tensor, partial(_as_result, like, written), op.func(*new_args, **new_kwargs))
    if any(isinstance(value, DTensorBase) for value in pytree.tree_leaves(result)):
        hold_result(result)
    else:
        _hold_writes(list(targets.values()), list(sources.values()))
    return result


def _index(name: str) -> str:
    """Return the index in the name of a list element, "2]" for `self[2]`; "" for a tensor that is not in a list."""
    return name.partition("[")[2]


def _as_result(like: DTensorBase, written: Written, value: Tensor) -> Tensor:
    """Return a result of the call: a written tensor unchanged, a new one (of a batch norm) as a replicated DTensor."""
    return value if value in written or isinstance(value, DTensorBase) else as_replicated(value, like)


# ---- gradients ------------------------------------------------------------------------------------------------------


def _hold_writes(targets: Sequence[Tensor], sources: Sequence[DTensorBase]) -> None:
    """Make the gradients of the sources distributed, although the gradient of the written tensor is plain.

    Inside `implicit_replication` they are without this; it is for backward passes after the block.
    """
    if not torch.is_grad_enabled():
        return
    origins: list[Node | Tensor] = [source.grad_fn or source for source in sources if source.requires_grad]
    if origins:
        writes = [Recorded.now(target, len(targets)) for target in targets]
        hold(partial(_mark_writes, writes, origins, sources[0]))


def _mark_writes(writes: Sequence[Recorded], origins: Sequence[Node | Tensor], like: DTensorBase) -> None:
    for write in writes:
        node = write.node()
        if node is None:
            continue
        edges = frozenset(i for i, (fn, _) in enumerate(node.next_functions) if _is_one_of(fn, origins))
        if edges:
            mark_formula_of_plain(node)
            node.register_hook(partial(_distribute_gradients, edges, like))


def _is_one_of(node: object, origins: Sequence[Node | Tensor]) -> bool:
    """Return whether a node is one of these, or accumulates the gradient of one of these leaves."""
    return node is not None and any(node is origin or getattr(node, "variable", None) is origin for origin in origins)


def _distribute_gradients(edges: frozenset[int], like: DTensorBase, grads: Gradients, _: Gradients) -> Gradients:
    return tuple(
        as_replicated(grad, like) if index in edges and grad is not None and not isinstance(grad, DTensorBase) else grad
        for index, grad in enumerate(grads)
    )
