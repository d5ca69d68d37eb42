"""Functions in C++ that PyTorch composes of other ops, and that create plain tensors in between.

`torch.combinations(x)` builds a mask from the size of x. Such a tensor is the same on all ranks, unlike one that the
user passes. Autograd decomposes the function before a tensor class sees it, so a kernel above autograd runs it with
plain tensors taken as replicated:

>>> torch.combinations(x)                          # the mask inside is taken as replicated
>>> torch.quantile(x, plain)                       # still an error: the plain tensor comes from outside
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from .._torch import pytree
from .._torch.above_autograd import Keys, call_original, tensors_in
from .._torch.ops import OpOverload
from ..dispatch.modes import begin_implicit_replication, end_implicit_replication
from ..ops.above_autograd import where_distributed
from ..ops.replicated import as_replicated
from ..sharding.base import DTensorBase


def taking_plain_as_replicated(func: OpOverload) -> Callable[..., object]:
    """Return a kernel that runs a composite function, and treats plain tensors created in it as replicated.

    A plain result, such as the integral over an empty dim, which depends on sizes alone, becomes a replicated DTensor.
    """

    def run(keys: Keys, *args: object, **kwargs: object) -> object:
        before = begin_implicit_replication()
        try:
            result = call_original(func, keys, *args, **kwargs)
        finally:
            end_implicit_replication(before)
        if isinstance(result, DTensorBase):
            return result
        like = next(tensor for tensor in tensors_in(args, kwargs) if isinstance(tensor, DTensorBase))
        return pytree.tree_map_only(
            Tensor, lambda t: t if isinstance(t, DTensorBase) else as_replicated(t, like), result
        )

    return where_distributed(func, run)
