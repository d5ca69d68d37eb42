"""Functions in C++ that PyTorch composes of other ops, and that need help on distributed tensors.

Most of them make plain tensors on their way: `torch.combinations(x)` builds a mask from the size of x. Such a tensor is
the same on all ranks, unlike one that the user brings. Autograd decomposes the function before a tensor class sees it,
so a kernel above autograd runs it with plain tensors taken as replicated:

>>> torch.combinations(x)                          # the mask inside is taken as replicated
>>> torch.quantile(x, plain)                       # still an error: the plain tensor comes from outside
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._torch import pytree
from .._torch.above_autograd import call_original, override_above_autograd
from .._torch.ops import OpOverload
from .._torch.schemas import find_overload, is_composite
from ..dispatch.modes import implicit_replication, modes
from ..sharding.base import DTensorBase

MAKE_TENSORS = (
    "combinations",
    "ctc_loss",
    "istft",
    "stft",
    "quantile",
    "nanquantile",
    "one_hot",
    "linalg_matrix_rank",
    "linalg_matrix_power",
    "linalg_pinv",
    "scaled_dot_product_attention",
    "_scaled_dot_product_attention_math",
)
"""Composite functions that make tensors from sizes and numbers alone."""


def install_composites() -> None:
    """Override these functions, and those in `REPLACED`."""
    for name in MAKE_TENSORS:
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads():
            func = getattr(packet, overload)
            if is_composite(func) and not any(argument.is_out for argument in func._schema.arguments):
                override_for_distributed(func, _taking_plain_as_replicated(func))
    with suppress(ImportError):  # PyTorch defines its ops when it is first imported
        importlib.import_module("torch.nn.modules.linear_cross_entropy")
    for name, replacement in REPLACED.items():
        found = find_overload(name)
        if found is not None:
            override_for_distributed(found, replacement(found))


def override_for_distributed(func: OpOverload, run: Callable[..., Any]) -> None:
    """Call `run(keys, *args, **kwargs)` in the place of a function whose tensors are all distributed.

    Plain tensors count as such where the user says that they are replicated; those without dims are numbers.
    """

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        plain = [tensor for tensor in tensors if not isinstance(tensor, DTensorBase)]
        if len(plain) < len(tensors) and (modes.implicit_replication or not any(tensor.dim() for tensor in plain)):
            return run(keys, *args, **kwargs)
        return call_original(func, keys, *args, **kwargs)

    override_above_autograd(func, kernel)


def _taking_plain_as_replicated(func: OpOverload) -> Callable[..., Any]:
    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        with implicit_replication():
            return call_original(func, keys, *args, **kwargs)

    return run


# ---- replaced by functions that do the same -------------------------------------------------------------------------


def _split_at_values(func: OpOverload) -> Callable[..., Any]:
    """tensor_split reads its indices from memory, which a distributed tensor has none of."""

    def run(keys: Any, tensor: Tensor, indices: Tensor, dim: int = 0) -> Any:
        return torch.tensor_split(tensor, indices.tolist(), dim)

    return run


def _linear_cross_entropy(func: OpOverload) -> Callable[..., Any]:
    """The loss of a linear layer's output, in one go: sharded logits are small, so they need not be made in chunks.

    The variant that reduces also returns gradients; here autograd computes them.
    """
    names = [argument.name for argument in func._schema.arguments]

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        named = {"reduction": "none", "label_smoothing": 0.0, **dict(zip(names, args, strict=False)), **kwargs}
        logits = F.linear(named["input"], named["linear_weight"], named["linear_bias"])
        options = {name: named[name] for name in ("reduction", "ignore_index", "label_smoothing")}
        loss = F.cross_entropy(logits, named["target"], named["weight"], **options)
        gradients = len(func._schema.returns) - 1
        return (loss, *(logits.new_empty(0) for _ in range(gradients))) if gradients else loss

    return run


REPLACED: dict[str, Callable[[OpOverload], Callable[..., Any]]] = {
    "aten::tensor_split.tensor_indices_or_sections": _split_at_values,
    "torch_nn::_linear_cross_entropy_batch_chunked": _linear_cross_entropy,
    "torch_nn::_linear_cross_entropy_batch_chunked_no_reduction": _linear_cross_entropy,
}
"""Functions, by name and overload, and what makes the function that runs on distributed tensors instead."""
