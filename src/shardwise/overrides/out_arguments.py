"""Functions in C++ that PyTorch composes of other ops, and that write into `out=` tensors.

They also write into plain tensors that they create, or into presumed views of their results. So on distributed tensors
the function without `out=` runs, and its results are copied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._torch import pytree
from .._torch.above_autograd import Keys
from .._torch.ops import OpOverload, schema_of
from ..dispatch.into_out import refuse_draw_into, refuse_other_dtypes, store
from ..errors import InputError
from ..ops.above_autograd import where_distributed


def copying_into_out(func: OpOverload) -> Callable[..., object]:
    """Return a kernel that runs a function without `out=`, and copies its results into the given tensors."""
    names = [argument.name for argument in schema_of(func).arguments if argument.is_out]

    def run(keys: Keys, *args: object, **kwargs: Any) -> Tensor | tuple[Tensor, ...]:
        everything = dict(kwargs)
        outs: list[Tensor] = [kwargs.pop(name) for name in names]
        given = pytree.tree_leaves((args, kwargs))
        if torch.is_grad_enabled() and any(isinstance(value, Tensor) and value.requires_grad for value in given):
            raise InputError(
                f"{func} with out= and arguments that require grad: gradients do not flow through out=",
                "leave out= out, or call it inside torch.no_grad()",
            )
        if not any(isinstance(value, Tensor) for value in given):
            refuse_draw_into(func, outs[0])
        refuse_other_dtypes(func, args, everything, kwargs)
        results = func.overloadpacket(*args, **kwargs)
        for out, result in zip(outs, [results] if isinstance(results, Tensor) else results, strict=True):
            store(func, result, out)
        return outs[0] if len(outs) == 1 else tuple(outs)

    return where_distributed(func, run)
