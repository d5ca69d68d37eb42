"""The index of an extreme: argmax, argmin, and max and min along a dim."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .call import Call
from .kernel import FactorShard, Gather, Kernel, KernelRun, LocalCall, Reduce, Steps
from .reduce import merged
from .registry import definitions_in
from .sorting import SCATTERS_INTO_ZEROS

define = definitions_in(__name__)

_LOW_HALF = 0xFFFFFFFF
_MOST_PACKED = 1 << 32
_NAN = 0x7FFFFFFF
_LEAST = -(2**63)


def _packs(dtype: torch.dtype, indices: int) -> bool:
    """Return whether a value of this dtype, and an index below `indices`, fit into half an int64 each."""
    return indices <= _MOST_PACKED and (dtype.itemsize < 4 or dtype in (torch.float32, torch.int32))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return a dtype of 8 bytes for values of this dtype."""
    if dtype.itemsize == 8:
        return dtype
    return torch.float64 if dtype.is_floating_point else torch.int64


def pack(value: Tensor, index: Tensor, largest: bool) -> Tensor:
    """Return value and index as one int64 whose maximum is the first extreme; a NaN comes before all numbers."""
    if value.dtype.is_floating_point:
        bits = value.float().contiguous().view(torch.int32).to(torch.int64)
        key = torch.where(bits >= 0, bits, -(bits & _NAN))  # floats of one sign are ordered like their bits
    else:
        key = value.to(torch.int64)
    key = key if largest else ~key
    if value.dtype.is_floating_point:
        key = torch.where(value.isnan(), _NAN, key)
    return (key << 32) | (_LOW_HALF - index)


def unpack(packed: Tensor, dtype: torch.dtype, largest: bool) -> tuple[Tensor, Tensor]:
    """Undo `pack`: return value and index."""
    key, index = packed >> 32, _LOW_HALF - (packed & _LOW_HALF)
    nan = key == _NAN
    key = key if largest else ~key
    if not dtype.is_floating_point:
        return key.to(dtype), index
    bits = torch.where(key >= 0, key, -key | -(2**31)).to(torch.int32)
    return torch.where(nan, torch.nan, bits.view(torch.float32)).to(dtype), index


def _first_extreme(
    value: Tensor | None, index: Tensor | None, indices: int, like: Tensor, shard: FactorShard, largest: bool
) -> Steps[tuple[Tensor, Tensor]]:
    """Return the extreme of all ranks, with shape and dtype of `like`, and its index, which is below `indices`.

    `value` and `index` are those of this rank; None if its shard is empty.
    """
    dtype, wide = like.dtype, _wide(like.dtype)
    if _packs(dtype, indices):
        least = torch.full(like.shape, _LEAST, dtype=torch.int64, device=like.device)
        found = least if value is None or index is None else pack(value, index, largest)
        return unpack((yield Reduce(found, "max")), dtype, largest)
    value = torch.zeros_like(like, dtype=wide) if value is None else value.to(wide)
    index = torch.zeros_like(like, dtype=torch.int64) if index is None else index
    bits = value.contiguous().view(torch.int64)
    parts = yield Gather(torch.stack([bits, index]))
    parts = parts[[start < stop for start, stop in shard.bounds]]
    # Pieces of several sharded dims are in no order: among equals the smallest index is the first.
    values, places = parts[:, 0].contiguous().view(wide), parts[:, 1]
    best = values.amax(0) if largest else values.amin(0)
    wins = (values == best) | values.isnan() if dtype.is_floating_point else values == best
    return best.to(dtype), torch.where(wins, places, torch.iinfo(torch.int64).max).amin(0)


def _local_extreme(x: Tensor, dim: int, largest: bool) -> tuple[Tensor, Tensor]:
    return x.max(dim) if largest else x.min(dim)


def extreme(largest: bool, values: bool) -> dict[str, Kernel]:
    """Return the kernel that finds the first maximum, or minimum: its index, and its value if wanted."""

    def run(call: LocalCall, shard: FactorShard) -> KernelRun:
        x, dim = call["self"], call.dims[0] or 0
        if not values and x.dtype in (torch.bool, torch.complex64, torch.complex128):
            call.run(self=x.new_zeros([1] * x.dim()))  # raises the error of this dtype
        if call.arguments.get("dim") is None:
            found = yield from _of_all(call, shard, largest)
        else:
            like = x.new_empty([size for d, size in enumerate(x.shape) if d != dim])
            value, index = _local_extreme(x, dim, largest) if shard.held else (None, None)
            index = None if index is None else index + shard.start
            size = call.given[0].shape[dim]
            found = yield from _first_extreme(value, index, size, like, shard, largest)
            if call["keepdim"]:
                found = found[0].unsqueeze(dim), found[1].unsqueeze(dim)
        return found if values else found[1]

    return {"k": Kernel(run, traffic=2.0, joint=True)}


def _of_all(call: LocalCall, shard: FactorShard, largest: bool) -> Steps[tuple[Tensor, Tensor]]:
    """Return the extreme over all dims and its index in the flattened global tensor."""
    x, layout = call["self"], call.given[0]
    shape = [1] * x.dim() if call["keepdim"] else []
    value = index = None
    if x.numel():
        value, flat = _local_extreme(x.reshape(-1), 0, largest)
        index = torch.zeros_like(flat)
        places = torch.unravel_index(flat, tuple(x.shape))
        for place, start, size in zip(places, layout.offset(call.at), layout.shape, strict=True):
            index = index * size + place + start
        value, index = value.reshape(shape), index.reshape(shape)
    return (yield from _first_extreme(value, index, math.prod(layout.shape), x.new_empty(shape), shard, largest))


def extreme_rule(outputs: int) -> Callable[[Call], str]:
    """Return the rule of an op that finds an extreme over a dim, or over all."""
    return lambda call: merged(call.ndim(0), call.arg("dim"), call.arg("keepdim"), outputs)


define("aten::argmax", extreme_rule(1), kernels=extreme(largest=True, values=False))
define("aten::argmin", extreme_rule(1), kernels=extreme(largest=False, values=False))
define(
    "aten::max.dim",
    extreme_rule(2),
    kernels=extreme(largest=True, values=True),
    derivative_makes_tensors=SCATTERS_INTO_ZEROS,
)
define(
    "aten::min.dim",
    extreme_rule(2),
    kernels=extreme(largest=False, values=True),
    derivative_makes_tensors=SCATTERS_INTO_ZEROS,
)
