"""The strides of an op's results, where PyTorch's meta kernel does not return those of the op itself.

Some meta kernels are written in Python, and their results have the strides that this formula gives. The record of such
an op names the rule by which the op chooses strides (`Op.strides`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch import pytree
from .._torch.symbols import has_symbols, shape_inference
from ..ops.advanced_indexing import Indexed
from ..ops.resolve import ResolvedOp
from ..sharding.memory_order import TensorMeta, contiguous_stride, in_memory_order, memory_order
from .result_meta import results_of_zeros

_AS_RUN = 1 << 16  # elements up to which an op is run to see its strides


def with_real_strides(op: ResolvedOp, args: Sequence[Any], kwargs: Mapping[str, object], outputs: Any) -> object:
    """Return the results of a call, as meta tensors, with the strides that the op gives them."""
    how = op.op.strides
    if how is None or op.variant != "functional" or op.is_view:
        return outputs
    if how == "as run":
        return _as_run(op, args, kwargs, outputs)
    if how == "indexed":
        return _laid_out(outputs, _indexed(outputs, *args))
    if how == "rolled":
        return _laid_out(outputs, _rolled(*args))
    operands = [value for value in (*args, *kwargs.values()) if isinstance(value, TensorMeta)]
    broadcast = how.startswith("elementwise") and len({meta.shape for meta in operands}) > 1
    if not broadcast and all(meta.stride == contiguous_stride(meta.shape) for meta in operands):
        return outputs
    return pytree.tree_map_only(Tensor, lambda result: _laid_out(result, _LAYOUTS[how](operands, result)), outputs)


def _laid_out(result: Tensor, stride: Sequence[int]) -> Tensor:
    with shape_inference(result.shape, stride):
        return torch.empty_strided(result.shape, stride, dtype=result.dtype, device="meta")


def _elementwise(operands: list[TensorMeta], result: Tensor) -> Sequence[int]:
    """Return the strides that `TensorIterator` gives: in the order of the first operand that has one."""
    # The meta kernels of elementwise ops, which are written in Python, differ from the ops where operands are broadcast
    # to each other and have dims of size 1. There an op is run on the CPU.
    broadcast = len({meta.shape for meta in operands}) > 1 and not has_symbols(operands)
    device = "cpu" if broadcast and result.numel() <= _AS_RUN else "meta"
    with shape_inference(operands), torch.no_grad():
        computed = _computed_dtype(operands, result.dtype)
        given = [torch.empty_strided(meta.shape, meta.stride, dtype=torch.float32, device=device) for meta in operands]
        # An operand of another dtype is converted first, and the copy of an expanded tensor is not expanded.
        given = [
            tensor if meta.dtype == computed else tensor.to(torch.float64).to(torch.float32)
            for tensor, meta in zip(given, operands, strict=True)
        ]
        return _iterated(given, result)


def _elementwise_reversed(operands: list[TensorMeta], result: Tensor) -> Sequence[int]:
    return _elementwise(operands[::-1], result)


def _computed_dtype(operands: list[TensorMeta], result: torch.dtype) -> torch.dtype:
    """Return the dtype in which an elementwise op computes, to which it converts its operands."""
    computed = operands[0].dtype
    if any(meta.dtype != computed for meta in operands):
        given = [torch.empty([1] if meta.shape else [], dtype=meta.dtype, device="meta") for meta in operands]
        computed = sum(given[1:], given[0]).dtype
    integral = not computed.is_floating_point and not computed.is_complex
    return result if integral and (result.is_floating_point or result.is_complex) else computed


def _iterated(operands: list[Tensor], result: Tensor) -> Sequence[int]:
    """Return the strides that `TensorIterator` gives the result for up to three operands of one dtype."""
    if len(operands) > 3:
        return result.stride()
    made = (torch.abs, torch.add, torch.addcmul)[len(operands) - 1](*operands)
    return made.stride() if made.shape == result.shape else result.stride()


def _indexed(result: Tensor, table: TensorMeta, indices: Sequence[Any]) -> Sequence[int]:
    """Return the strides of an indexed table.

    They are those of a `TensorIterator` over the indices and the table, expanded along the dims of the indices.
    """
    given = [index for index in indices if index is not None]
    if not given or any(index.dtype in (torch.bool, torch.uint8) for index in given):
        return result.stride()
    where = Indexed(indices, len(table.shape))
    steps = [table.stride[dim] for dim in where.others]
    steps[where.at : where.at] = [0] * where.rank
    before, after = [1] * where.at, [1] * (len(where.others) - where.at)
    shape = result.shape[where.at : where.at + where.rank]
    with shape_inference(shape, steps), torch.no_grad():
        expanded = {torch.empty_strided(i.shape, i.stride, device="meta").expand(shape).stride(): None for i in given}
        others = [torch.empty_strided(shape, stride, device="meta") for stride in expanded]
        placed = [index.reshape([*before, *shape, *after]) for index in others]
        return _iterated([torch.empty_strided(result.shape, steps, device="meta"), *placed], result)


def _rolled(table: TensorMeta, shifts: Sequence[int], dims: Sequence[int] = ()) -> Sequence[int]:
    """Return the strides of `roll`, which joins two slices along each dim; without dims, it rolls a flat copy."""
    if not dims or not table.shape.numel() or table.stride == contiguous_stride(table.shape):
        return contiguous_stride(table.shape)
    with shape_inference(table.shape, table.stride), torch.no_grad():
        made = torch.empty_strided(table.shape, table.stride, device="meta")
        for shift, dim in zip(shifts, dims, strict=True):
            start = -shift % made.shape[dim]
            made = torch.cat([made.narrow(dim, start, made.shape[dim] - start), made.narrow(dim, 0, start)], dim)
        return made.stride()


def _row_major(operands: list[TensorMeta], result: Tensor) -> Sequence[int]:
    return contiguous_stride(result.shape)


def _row_major_if_complex(operands: list[TensorMeta], result: Tensor) -> Sequence[int]:
    return contiguous_stride(result.shape) if operands[0].dtype.is_complex else result.stride()


def _channels_last(operands: list[TensorMeta], result: Tensor) -> Sequence[int]:
    """Return channels-last strides if the first operand with as many dims has them, else row-major ones."""
    given = next((meta for meta in operands if len(meta.shape) == result.dim()), None)
    return _laid_out_as(result, given is not None and _has_channels_last(given.shape, given.stride))


def _channels_last_of_input(operands: list[TensorMeta], result: Tensor) -> Sequence[int]:
    """Return the strides of a gradient that follow the input, the second operand, and not the incoming gradient."""
    return _channels_last(operands[1:], result)


def _batch_norm(operands: list[TensorMeta], result: Tensor) -> Sequence[int]:
    """Return channels-last strides if the input has them and is not packed row-major, else row-major ones."""
    given = operands[0]
    if len(given.shape) != result.dim() or _is_packed(given, _row_major_dims(given)):
        return contiguous_stride(result.shape)
    return _laid_out_as(result, _is_packed_channels_last(given) or _has_channels_last(given.shape, given.stride))


def _batch_norm_backward(operands: list[TensorMeta], result: Tensor) -> Sequence[int]:
    """Return the strides of `_batch_norm` if gradient and input are packed alike, else those of `_channels_last`."""
    gradient, given, *_ = operands
    alike = _has_channels_last(gradient.shape, gradient.stride) == _has_channels_last(given.shape, given.stride)
    packed = all(
        _is_packed(meta, _row_major_dims(meta)) or _is_packed_channels_last(meta) for meta in (gradient, given)
    )
    return _batch_norm([given], result) if alike and packed else _channels_last([given], result)


def _convolution(operands: list[TensorMeta], result: Tensor) -> Sequence[int]:
    """Return channels-last strides if the input or the weight has them, else row-major ones.

    With one spatial dim, PyTorch adds another of size 1 to the input, which it copies if it is not packed, and to the
    weight.
    """
    given = operands[:2]
    if result.dim() == 3:
        if not _is_packed(given[0], _row_major_dims(given[0])):
            given = given[1:]  # the copy is row-major
        given = [_with_unit_dim(meta) for meta in given]
    return _laid_out_as(result, any(_has_channels_last(meta.shape, meta.stride) for meta in given))


def _with_unit_dim(meta: TensorMeta) -> TensorMeta:
    (rows, channels, length), (row, channel, step), dtype = meta
    return TensorMeta(torch.Size((rows, channels, 1, length)), (row, channel, length * step, step), dtype)


def _has_channels_last(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether strides grow from dim 1 over the spatial dims, last to first, to dim 0.

    PyTorch checks no more than this.
    """
    if len(shape) not in (4, 5) or stride[1] == 0:
        return False
    least = 0
    for dim in (1, *range(len(shape) - 1, 1, -1), 0):
        if shape[dim] == 0 or stride[dim] < least or (dim == 0 and least == stride[1]):
            return False
        least = stride[dim] * max(shape[dim], 1)
    return True


def _is_packed_channels_last(meta: TensorMeta) -> bool:
    count = len(meta.shape)
    return count in (4, 5) and _is_packed(meta, (1, *range(count - 1, 1, -1), 0))


def _is_packed(meta: TensorMeta, dims: Sequence[int]) -> bool:
    """Return whether the tensor has no gaps with these dims innermost first; dims of size 1 may have any stride."""
    step = 1
    for dim in dims:
        if meta.shape[dim] not in (1, 0):
            if meta.stride[dim] != step:
                return False
            step *= meta.shape[dim]
    return True


def _row_major_dims(meta: TensorMeta) -> Sequence[int]:
    return range(len(meta.shape) - 1, -1, -1)


def _laid_out_as(result: Tensor, channels_last: bool) -> Sequence[int]:
    return _put_channels_last(result.shape) if channels_last else contiguous_stride(result.shape)


def _put_channels_last(shape: Sequence[int]) -> Sequence[int]:
    rows, channels, *spatial = shape
    packed = contiguous_stride((rows, *spatial, channels))
    return packed[0], packed[-1], *packed[1:-1]


_LAYOUTS: dict[str, Callable[[list[TensorMeta], Tensor], Sequence[int]]] = {
    "elementwise": _elementwise,
    "elementwise reversed": _elementwise_reversed,
    "row-major": _row_major,
    "row-major if complex": _row_major_if_complex,
    "channels last": _channels_last,
    "channels last of input": _channels_last_of_input,
    "batch norm": _batch_norm,
    "batch norm backward": _batch_norm_backward,
    "convolution": _convolution,
}


def _as_run(op: ResolvedOp, args: Sequence[object], kwargs: Mapping[str, object], outputs: object) -> object:
    """Return the results with the strides of the op on zeros. Large tensors get the order of dims of small ones."""
    found = results_of_zeros(op.func, args, dict(kwargs), _AS_RUN)
    if found is not None:
        return found
    given = [_small(value) for value in args], {name: _small(value) for name, value in kwargs.items()}
    flat, tree = pytree.tree_flatten(outputs)
    shown = pytree.tree_leaves(results_of_zeros(op.func, given[0], given[1], _AS_RUN))
    if [_dims(result) for result in shown] != [_dims(result) for result in flat]:
        return outputs
    return pytree.tree_unflatten(list(map(_ordered_as, flat, shown)), tree)


def _small(value: object) -> object:
    """Return a `TensorMeta` with sizes of at most 2 and the same order of dims in memory; other values unchanged."""
    if not isinstance(value, TensorMeta):
        return value
    made = in_memory_order(torch.empty([min(n, 2) for n in value.shape], device="meta"), memory_order(value))
    return TensorMeta(made.shape, made.stride(), value.dtype)


def _dims(result: object) -> int | None:
    return result.dim() if isinstance(result, Tensor) else None


def _ordered_as(result: object, shown: Tensor) -> object:
    """Return a result with its dims in the same order in memory as those of `shown`."""
    if not isinstance(result, Tensor):
        return result
    order = memory_order(TensorMeta(shown.shape, shown.stride(), shown.dtype))
    with shape_inference(result.shape), torch.no_grad():
        return in_memory_order(torch.empty(result.shape, dtype=result.dtype, device="meta"), order)
