"""Batching rules of vmap that make plain tensors.

>>> torch.vmap(F.embedding)(indices, tables)       # adds a range to the indices: the same on all ranks
"""

from __future__ import annotations

from collections.abc import Callable

from .._torch.above_autograd import Keys, tensors_in
from .._torch.ops import OpOverload
from .._torch.transforms import batch_rule, innermost
from ..dispatch.modes import implicit_replication
from ..sharding.base import DTensorBase


def batched_taking_plain_as_replicated(func: OpOverload) -> Callable[..., object]:
    """Wrap PyTorch's batching rule: plain tensors it creates count as replicated if all arguments are distributed."""
    rule = batch_rule(func)

    def kernel(keys: Keys, *args: object, **kwargs: object) -> object:
        tensors = tensors_in(args, kwargs)
        if not all(isinstance(innermost(tensor), DTensorBase) for tensor in tensors):
            return rule(keys, *args, **kwargs)
        with implicit_replication():
            return rule(keys, *args, **kwargs)

    return kernel
