"""Which dtypes backends move or reduce, and how the others are sent.

gloo neither moves nor reduces int16 and float8 and has no complex all-to-all; it reduces the real and imaginary parts
of complex numbers by max separately, without an error. So other dtypes are sent as bytes, and what cannot be reduced
natively is gathered and reduced locally.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import CommunicationError

_REDUCIBLE = {
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
}
_MOVABLE = _REDUCIBLE | {torch.bool}

# What a bool reduction is on the bytes 0 and 1.
_BOOL_OPS = {"sum": "max", "max": "max", "min": "min", "product": "min"}


def moves_natively(dtype: torch.dtype) -> bool:
    """Return whether every backend moves this dtype."""
    return dtype in _MOVABLE


def reduces_natively(dtype: torch.dtype, op: str) -> bool:
    """Return whether every backend reduces this dtype by this op, perhaps viewed as another dtype (see `to_wire`)."""
    return dtype in _REDUCIBLE or dtype is torch.bool or (dtype.is_complex and op in ("sum", "avg"))


def wire_op(dtype: torch.dtype, op: str) -> str:
    """Return the reduction that the backend performs."""
    return _BOOL_OPS[op] if dtype is torch.bool else op


def needs_no_conversion(dtype: torch.dtype, op: str) -> bool:
    """Return whether `to_wire` returns tensors of this dtype unchanged."""
    return not (dtype is torch.bool or dtype.is_complex or _is_ordered(dtype, op))


def to_wire(tensor: Tensor, op: str = "sum") -> Tensor:
    """Return a contiguous tensor, converted so that backends can reduce it."""
    if tensor.dtype is torch.bool:
        return tensor.view(torch.uint8)
    if _is_ordered(tensor.dtype, op):
        return _ordered(tensor, op)
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def from_wire(tensor: Tensor, dtype: torch.dtype, op: str = "sum") -> Tensor:
    """Undo `to_wire` on the reduced tensor."""
    if dtype is torch.bool:
        return tensor.view(torch.bool)
    if _is_ordered(dtype, op):
        return _by_order(tensor).view(torch.float64 if dtype is torch.float64 else torch.float32).to(dtype)
    return torch.view_as_complex(tensor) if dtype.is_complex else tensor


def _is_ordered(dtype: torch.dtype, op: str) -> bool:
    """Return whether floats are sent as integers in the same order: backends lose NaNs in a max or min of floats."""
    return op in ("max", "min") and dtype.is_floating_point and dtype.itemsize > 1


def _ordered(tensor: Tensor, op: str) -> Tensor:
    wide = tensor if tensor.dtype is torch.float64 else tensor.float()
    integer = torch.int64 if wide.dtype is torch.float64 else torch.int32
    limits = torch.iinfo(integer)
    return _by_order(wide.view(integer)).masked_fill(tensor.isnan(), limits.max if op == "max" else limits.min)


def _by_order(bits: Tensor) -> Tensor:
    """Return the bits of floats as integers in the order of the floats (those of negative floats are reversed).

    The function is its own inverse.
    """
    return torch.where(bits < 0, bits ^ torch.iinfo(bits.dtype).max, bits)


def check_reducible(dtype: torch.dtype, op: str) -> None:
    """Raise if a reduction is not defined for a dtype."""
    if op == "avg" and not (dtype.is_floating_point or dtype.is_complex):
        raise CommunicationError(
            f"Partial(avg) cannot reduce {dtype}", "an average needs a floating-point dtype: cast first, e.g. x.float()"
        )
    if op in ("max", "min") and dtype.is_complex:
        raise CommunicationError(
            f"Partial({op}) cannot reduce {dtype}: complex numbers have no order", "use Partial('sum') or 'product'"
        )


def divided_sum(divisor: int, dtype: torch.dtype) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Return two functions, of the operands and of their sum, that together divide the sum by a number.

    The sum is divided, which rounds once. In float16 the sum might overflow, so the operands are first divided by a
    power of two, which does not round.
    """
    first = 1 << (divisor.bit_length() - 1) if dtype is torch.float16 else 1
    rest = divisor / first
    return (
        (lambda operand: operand) if first == 1 else (lambda operand: operand / first),
        (lambda total: total) if rest == 1 else (lambda total: total.div_(rest)),
    )


def reduce_locally(stacked: Tensor, op: str, divisor: int = 1) -> Tensor:
    """Reduce the operands stacked along dim 0, and divide a sum by `divisor`."""
    dtype = stacked.dtype
    if divisor != 1:
        # float8 has no arithmetic, and the sum of float16 might overflow
        total = reduce_locally(stacked.float() if dtype.itemsize <= 2 else stacked, op)
        return total.div_(divisor).to(dtype)
    if dtype is torch.bool:
        return stacked.any(0) if op in ("sum", "max") else stacked.all(0)
    if dtype.is_floating_point and dtype.itemsize == 1:  # float8 has no arithmetic
        return reduce_locally(stacked.float(), op).to(dtype)
    if op == "sum" and dtype.is_complex:
        return torch.view_as_complex(reduce_locally(torch.view_as_real(stacked), op))
    if op == "sum":
        total = stacked.sum(0, dtype=dtype)
        # PyTorch starts from 0.0, so a sum of -0.0 alone would be 0.0.
        return total.masked_fill_((total == 0) & stacked.signbit().all(0), -0.0) if dtype.is_floating_point else total
    if op == "product":
        return stacked.prod(0, dtype=dtype)
    if op == "avg":
        return stacked.mean(0)
    return stacked.amax(0) if op == "max" else stacked.amin(0)


def identity(dtype: torch.dtype, op: str) -> complex | float | int | bool:
    """Return the identity of a reduction: the value that does not change its result.

    For a sum it is -0.0, since 0.0 would change -0.0.
    """
    if op in ("sum", "avg"):
        if dtype.is_complex:
            return complex(-0.0, -0.0)
        return -0.0 if dtype.is_floating_point and dtype.itemsize > 1 else 0
    if op == "product":
        return 1
    if dtype is torch.bool:
        return op == "min"
    if dtype.is_floating_point:
        has_inf = dtype.itemsize > 1 or dtype is torch.float8_e5m2
        limit = torch.inf if has_inf else torch.finfo(dtype).max
        return -limit if op == "max" else limit
    return torch.iinfo(dtype).min if op == "max" else torch.iinfo(dtype).max
