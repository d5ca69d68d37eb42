"""PyTorch's own functions that make plain tensors on their way.

`torch.combinations(x)` is made of other ops, and builds a mask that x never was part of. Such a tensor is the same on
all ranks, unlike one that the user brings: for that the dispatcher asks.

- Functions in C++ are taken apart by autograd before a tensor class sees them. So a kernel stands above autograd. It
  lets the function run as it is, with plain tensors taken as replicated; a few are replaced there by others that do
  the same, and so are all with `out=`.
- Functions in Python are known by the frame that calls the op.

>>> torch.combinations(x)                          # the mask inside is taken as replicated
>>> torch.quantile(x, plain)                       # still an error: the plain tensor comes from outside
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache
from types import CodeType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._torch import pytree
from .._torch.above_autograd import call_original, override_above_autograd
from .._torch.ops import OpOverload
from ..dispatch.modes import implicit_replication
from ..errors import InputError

COMPOSITES = (
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
"""Functions in C++, made of other ops, that make tensors from numbers alone."""


@lru_cache(maxsize=1)
def _in_python() -> dict[CodeType, tuple[str, ...]]:
    """Functions in Python that do so; with those of their parameters that they fill themselves where they are None."""
    from torch import _lowrank, functional
    from torch.masked import _ops as masked
    from torch.nn.modules import transformer

    return {
        _lowrank.get_approximate_basis.__code__: (),
        masked.mean.__code__: (),
        masked._std_var.__code__: (),
        functional._unravel_index.__code__: (),
        F.embedding_bag.__code__: ("offsets",),
        F.multi_head_attention_forward.__code__: (),
        transformer._detect_is_causal_mask.__code__: (),
        **{
            module.forward.__code__: ("hx",)
            for module in (nn.RNN, nn.GRU, nn.LSTM, nn.RNNCell, nn.GRUCell, nn.LSTMCell)
        },
        F.fractional_max_pool2d_with_indices.__code__: ("_random_samples",),
        F.fractional_max_pool3d_with_indices.__code__: ("_random_samples",),
    }


def made_by_pytorch(kind: type[Tensor]) -> bool:
    """Whether an op is called by a function that makes plain tensors, and was given none."""
    frame = sys._getframe(1)
    while frame.f_code not in _in_python():
        helps = frame.f_globals.get("__name__", "").startswith(("torch.", "shardwise."))  # called on the way
        if frame.f_back is None or not helps:
            return False
        frame = frame.f_back
    code, fills = frame.f_code, _in_python()[frame.f_code]
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    given = [frame.f_locals.get(name) for name in names if name not in fills]
    return not any(isinstance(value, Tensor) and not isinstance(value, kind) and value.dim() for value in given)


# ---- in C++ ---------------------------------------------------------------------------------------------------------


def _split_at(keys: Any, tensor: Tensor, indices: Tensor, dim: int = 0) -> Any:
    """tensor_split reads its indices from memory, which a distributed tensor has none of."""
    return torch.tensor_split(tensor, indices.tolist(), dim)


def _losses(
    keys: Any,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    ignore_index: int,
    *_how: Any,
) -> Tensor:
    """The losses in chunks are written into buffers; cut over ranks, the logits are smaller as well."""
    logits = F.linear(input, linear_weight, linear_bias)
    return F.cross_entropy(logits, target, weight, reduction="none", ignore_index=ignore_index)


def _loss(
    keys: Any,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    *_how: Any,
) -> tuple[Tensor, ...]:
    """The loss in chunks, which also holds its gradients; here autograd finds them."""
    logits = F.linear(input, linear_weight, linear_bias)
    options: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    found = F.cross_entropy(logits, target, weight, reduction=reduction, **options)
    return found, *(input.new_empty(0) for _ in range(3))


REPLACED: dict[str, Callable[..., Any]] = {
    "aten::tensor_split.tensor_indices_or_sections": _split_at,
    "torch_nn::_linear_cross_entropy_batch_chunked": _loss,
    "torch_nn::_linear_cross_entropy_batch_chunked_no_reduction": _losses,
}
"""Functions, by name and overload, and what runs on distributed tensors instead; it is given the keys, too."""

RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
"""Functions in C++ that PyTorch's fused kernels replace where it has them, for whole tensors."""


def _step_by_step(func: OpOverload) -> Callable[..., Any]:
    """The function made of ops that have rules."""

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        mkldnn, cudnn = torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled()
        torch._C._set_mkldnn_enabled(False)
        torch._C._set_cudnn_enabled(False)
        try:
            return call_original(func, keys, *args, **kwargs)
        finally:
            torch._C._set_mkldnn_enabled(mkldnn)
            torch._C._set_cudnn_enabled(cudnn)

    return run


def install_composites(kind: type[Tensor]) -> None:
    """Let these functions run on tensors of this class."""
    for name in COMPOSITES:
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads():
            func = getattr(packet, overload)
            if _is_composite(func) and not any(argument.is_out for argument in func._schema.arguments):
                _register(func, kind, _as_it_is(func))
    for func in _with_out():
        _register(func, kind, _into(func))
    for name in RECURRENT:
        for overload in ("input", "data"):
            func = getattr(getattr(torch.ops.aten, name), overload)
            _register(func, kind, _step_by_step(func), enough=any)  # PyTorch may have made the first state
    with suppress(ImportError):  # PyTorch defines its ops when they are first asked for
        importlib.import_module("torch.nn.modules.linear_cross_entropy")
    for name, other in REPLACED.items():
        found = _overload(name)
        if found is not None:
            _register(found, kind, other)


# ---- with results given ---------------------------------------------------------------------------------------------


def _with_out() -> Iterator[OpOverload]:
    """The functions made of other ops that write into results that are given.

    They write to plain tensors of their own as well, or to what they take for a view of a result.
    """
    for schema in torch._C._jit_get_all_schemas():
        if "out" not in schema.overload_name or not schema.name.startswith("aten::"):  # most
            continue
        func = _overload(f"{schema.name}.{schema.overload_name}")
        if func is not None and _is_composite(func) and any(argument.is_out for argument in schema.arguments):
            yield func


def _into(func: OpOverload) -> Callable[..., Any]:
    """The function without them, and its results copied."""
    names = [argument.name for argument in func._schema.arguments if argument.is_out]

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        outs = [kwargs.pop(name) for name in names]
        given = pytree.tree_leaves((args, kwargs))
        if torch.is_grad_enabled() and any(isinstance(value, Tensor) and value.requires_grad for value in given):
            raise InputError(f"{func} with gradients: they do not flow through out=", "leave it, or use no_grad")
        results = func.overloadpacket(*args, **kwargs)
        for out, result in zip(outs, [results] if isinstance(results, Tensor) else results, strict=True):
            if out.shape != result.shape or not torch.can_cast(result.dtype, out.dtype):
                told = f"{result.dtype}{list(result.shape)} into {out.dtype}{list(out.shape)}"
                raise InputError(f"{func} would write {told}", "write into a tensor of the result's shape and dtype")
            out.copy_(result)
        return outs[0] if len(outs) == 1 else tuple(outs)

    return run


def _is_composite(func: OpOverload) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _overload(name: str) -> OpOverload | None:
    space, _, op = name.partition("::")
    packet, _, overload = op.partition(".")
    return getattr(getattr(getattr(torch.ops, space), packet, None), overload or "default", None)


def _as_it_is(func: OpOverload) -> Callable[..., Any]:
    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        with implicit_replication():
            return call_original(func, keys, *args, **kwargs)

    return run


def _register(func: OpOverload, kind: type[Tensor], run: Callable[..., Any], enough: Callable[..., bool] = all) -> None:
    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        if tensors and enough(isinstance(tensor, kind) or tensor.dim() == 0 for tensor in tensors):
            return run(keys, *args, **kwargs)
        return call_original(func, keys, *args, **kwargs)

    override_above_autograd(func, kernel)
