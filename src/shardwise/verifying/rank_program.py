"""Run a program for one rank's local tensors on all simulated ranks: plain tensors become per-rank tensors.

A process has tensors of its own. In a simulated world a plain tensor belongs to all ranks at once. While `RankProgram`
is active, code that is written for local tensors runs as in a process:

- a tensor made by the user's code is per rank, so that ranks may write different values into it;
- ops on plain tensors accept numbers that differ between ranks, such as a rank (`rank_numbers`);
- collectives of plain tensors, which the fake process group would ignore, move data.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .._torch.modes import OwnMode
from .._torch.modules import buffers_of, parameters_of
from .._torch.ops import OpOverload
from .._torch.pytree import tree_leaves, tree_map
from ..ops.call import Args, Kwargs
from ..sharding.source_lines import called_by_user
from ..world import RankTensor, common, replicate
from ..world.implementation import implementation_of
from ..world.mapping import by_rank

_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")


class RankProgram(OwnMode):
    """A mode in which code for local tensors runs in a simulated world as in a process of each rank."""

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        if types:  # a tensor class of ours, which handles ranks itself
            return func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if tensors and func.namespace in _COLLECTIVES:
            return _on_copies(func, args, kwargs)
        if by_rank(args) is not None or by_rank(list(kwargs.values())) is not None:
            return implementation_of(func)(args, kwargs)
        result = func(*args, **kwargs)
        is_new = not tensors or func is torch.ops.aten.lift_fresh.default
        if is_new and type(result) is Tensor and called_by_user():
            return replicate(result)
        return result


def _on_copies(func: OpOverload, args: Args, kwargs: Kwargs) -> object:
    """Run a collective on copies of plain tensors, one for each rank, and write back what all ranks got."""
    copies: dict[int, tuple[Tensor, RankTensor]] = {}

    def copied(value: object) -> object:
        if not isinstance(value, Tensor):
            return value
        return copies.setdefault(id(value), (value, replicate(value)))[1]

    result = implementation_of(func)(*tree_map(copied, (list(args), kwargs)))
    for original, copy in copies.values():
        original.copy_(common(copy))
    originals = {id(copy): original for original, copy in copies.values()}
    return tree_map(lambda value: originals.get(id(value), value), result)


def make_per_rank(model: nn.Module) -> None:
    """Turn the parameters and buffers of a model into per-rank ones with the same values. Tied ones stay tied."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for table in (parameters_of(module), buffers_of(module)):
            for name, tensor in table.items():
                if tensor is not None:
                    if id(tensor) not in made:
                        made[id(tensor)] = _per_rank(tensor)
                    table[name] = made[id(tensor)]  # type: ignore[assignment]


def _per_rank(tensor: Tensor) -> Tensor:
    local = tensor.detach() if isinstance(tensor, RankTensor) else replicate(tensor)
    if not isinstance(tensor, nn.Parameter):
        return local
    parameter = nn.Parameter(local, tensor.requires_grad)
    parameter.__dict__.update(tensor.__dict__)  # marks that programs set, such as `weight.sequence_parallel = True`
    return parameter
