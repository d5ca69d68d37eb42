"""Batching rules of vmap that make plain tensors.

>>> torch.vmap(F.embedding)(indices, tables)       # the rule adds a plain range, the same on all ranks, to the indices
"""

from __future__ import annotations

from collections.abc import Callable

from .._torch.above_autograd import Keys, tensors_in
from .._torch.ops import OpOverload
from .._torch.transforms import batch_rule, innermost
from ..dispatch.modes import implicit_replication
from ..sharding.base import DTensorBase


def batched_taking_plain_as_replicated(func: OpOverload) -> Callable[..., object]:
    """Return a kernel that runs PyTorch's batching rule.

    If all tensor arguments are distributed, plain tensors that the rule creates are taken as replicated.
    """
    rule = batch_rule(func)

    def kernel(keys: Keys, *args: object, **kwargs: object) -> object:
        tensors = tensors_in(args, kwargs)
        if not all(isinstance(innermost(tensor), DTensorBase) for tensor in tensors):
            return rule(keys, *args, **kwargs)
        with implicit_replication():
            return rule(keys, *args, **kwargs)

    return kernel
