"""Functions in C++ that PyTorch composes of other ops, and that write into results they are given (`out=`).

On their way they also write into plain tensors of their own, or into what they take for a view of a result. So on
distributed tensors the function without `out=` runs, and its results are copied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._torch import pytree
from .._torch.ops import OpOverload
from .._torch.schemas import composites_with_out
from ..errors import InputError
from .composites import override_for_distributed


def install_out_arguments() -> None:
    """Override these functions."""
    for func in composites_with_out():
        override_for_distributed(func, _copying(func))


def _copying(func: OpOverload) -> Callable[..., Any]:
    names = [argument.name for argument in func._schema.arguments if argument.is_out]

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        outs = [kwargs.pop(name) for name in names]
        given = pytree.tree_leaves((args, kwargs))
        if torch.is_grad_enabled() and any(isinstance(value, Tensor) and value.requires_grad for value in given):
            raise InputError(f"{func} with gradients: they do not flow through out=", "leave it, or use no_grad")
        results = func.overloadpacket(*args, **kwargs)
        for out, result in zip(outs, [results] if isinstance(results, Tensor) else results, strict=True):
            _copy(func, result, out)
        return outs[0] if len(outs) == 1 else tuple(outs)

    return run


def _copy(func: OpOverload, result: Tensor, out: Tensor) -> None:
    if out.shape != result.shape or not torch.can_cast(result.dtype, out.dtype):
        problem = f"{result.dtype}{list(result.shape)} into {out.dtype}{list(out.shape)}"
        raise InputError(f"{func} would write {problem}", "write into a tensor of the result's shape and dtype")
    out.copy_(result)
