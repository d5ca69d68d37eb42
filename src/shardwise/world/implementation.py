"""How an op runs on RankTensors: by a function that is registered for it, or on every rank in turn.

>>> implementation_of(torch.ops.aten.neg.default)([RankTensor([torch.ones(1), torch.zeros(1)])], None)
RankTensor(
  rank 0: tensor([-1.])
  rank 1: tensor([-0.])
)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch

from .._torch.ops import OpAttribute, OpOverload
from ..errors import WorldError
from .rank_op import describe

__all__ = ["implementation_of", "implements"]

Implementation = Callable[[Sequence[object], dict[str, object] | None], object]
Function = TypeVar("Function", bound=Callable[..., object])

# Ops of these namespaces communicate. Running one on every rank would call the fake process group, which moves no data
# and raises no error.
_COMMUNICATING = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "_dtensor", "symm_mem")


def implements(*namespaces: str) -> Callable[[Function], Function]:
    """Register the decorated function as the implementation on RankTensors of the op with its name.

    In each of these namespaces that has such an op.

    >>> @implements("aten")
    ... def detach(x: RankTensor) -> RankTensor: ...
    """

    def register(function: Function) -> Function:
        for namespace in namespaces:
            packet = getattr(getattr(torch.ops, namespace), function.__name__, None)
            if packet is not None:
                implementation_of.set(packet.default, partial(_call, function))
        return function

    return register


def _on_every_rank(func: OpOverload) -> Implementation:
    """Return the function of (args, kwargs) that runs this op rank by rank; raise if the op communicates."""
    # Imported here because these modules import RankTensor, which imports this one.
    from . import mapping, writing

    if func.namespace in _COMMUNICATING:
        raise WorldError(
            f"{func} is not available in a simulated world",
            "use the functional collectives (torch.ops._c10d_functional), or dist.all_reduce, broadcast, all_gather, "
            "reduce_scatter, all_to_all and those of them that end in _tensor or _single",
        )
    op = describe(func)
    if op.writes:
        return partial(writing.run_writing, op)
    return partial(mapping.run_view if op.view else mapping.run, op)


def _call(function: Callable[..., object], args: Sequence[object], kwargs: dict[str, object] | None) -> object:
    return function(*args, **kwargs) if kwargs else function(*args)


implementation_of = OpAttribute[Implementation]("on_ranks", _on_every_rank)
"""From an op to the function of (args, kwargs) that runs it on RankTensors."""
