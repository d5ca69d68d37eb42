"""Look-ups and writes of rows and elements by index along a sharded dim, without communication.

A rank shifts the indices by the start of its shard. For a look-up it returns zeros for rows of other ranks, and the
result is a sum over ranks. For a write, rows of other ranks go to one extra row, which is dropped again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from .._torch.fake_tensors import has_readable_values
from .._torch.ops import overload_name, packet_name
from ..notation.build import dims_text, join
from ..sharding.recording import recorded
from .above_autograd import filling_integers_without_gradient
from .call import Call
from .kernel import FactorShard, Kernel, KernelRun, LocalCall, no_summand, without_communication
from .registry import definitions_in

aten = torch.ops.aten
define = definitions_in(__name__)


def _check_range(index: Tensor, least: int, size: int) -> None:
    """Raise the error of one device for an index that is out of range."""
    low, high = index.aminmax()
    if low < least or high >= size:
        raise IndexError(f"index {int(low if low < least else high)} is out of bounds for dimension with size {size}")


def shifted(index: Tensor, shard: FactorShard, wraps: bool = False) -> tuple[Tensor, Tensor]:
    """Return indices into this rank's rows, and a mask of those in range. `wraps`: negative ones count from the end."""
    if index.numel() and has_readable_values(index):
        recorded(_check_range, index, -shard.size if wraps else 0, shard.size)
    if wraps:
        index = torch.where(index < 0, index + shard.size, index)
    index = index - shard.start
    return index, (index >= 0) & (index < shard.held)


def with_extra_row(tensor: Tensor, dim: int) -> Tensor:
    """Return the tensor with one more row, of zeros, along a dim."""
    shape = list(tensor.shape)
    shape[dim] = 1
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)


def kept(hit: Tensor, found: Tensor) -> Tensor:
    """Return `found` where `hit`, else zeros that change no sum. (A product with 0 would turn infinity into NaN.)"""
    return torch.where(hit, found, no_summand(found, ()))


def functional(call: LocalCall) -> Callable[..., Tensor]:
    """Return the functional op of an in-place or `out=` variant, as a function of the arguments to replace."""
    packet = getattr(aten, packet_name(call.func).removeprefix("aten::").removesuffix("_"))
    overload = overload_name(call.func).removesuffix("out").removesuffix("_") or "default"
    return replace(call, func=getattr(packet, overload)).run


def free(run: Callable[[LocalCall, FactorShard], KernelRun]) -> dict[str, Kernel]:
    """Return the kernels of an op whose factor `v` needs no communication."""
    return {"v": Kernel(run, rounds=0, traffic=0.0)}


# ---- an index for every element -------------------------------------------------------------------------------------


def gather_rule(call: Call) -> str:
    """Return the rule: an index for every element of the result.

    Other dims are sharded together where their sizes agree.
    """
    ndim = call.ndim(0)
    if ndim == 0 or call.ndim(1) != ndim:  # an index without elements may have any rank
        return "[x..], [i..] -> [i..] ; linear 0"
    table, index = (dims_text("x", ndim, {call.arg("dim") % ndim: name}) for name in ("v", "i"))
    return join(f"{table}, {index} -> {index}", "linear 0", "ragged", "kernel v")


@without_communication
def gather(call: LocalCall, shard: FactorShard) -> Tensor:
    """Look up the elements whose index this rank holds; the others are zeros in a sum."""
    tensor, (index, hit) = call["self"], shifted(call["index"], shard)
    if not shard.held:
        return no_summand(tensor, index.shape)
    return kept(hit, tensor.gather(call.sharded_dim, index.where(hit, 0)))


def scatter_rule(call: Call) -> str:
    """Return the rule: an index for every element of the source, or one value for all.

    Where elements are added, the source may be sharded.
    """
    ndim, source = call.ndim(0), len(call.tensors) > 2
    reduce = "sum" if "scatter_add" in packet_name(call.op) else call.arg("reduce", None)
    adds = source and reduce in ("sum", "add") and call.arg("include_self", True)
    linear = "linear 0+2" if adds or (source and reduce is None) else ""
    if ndim == 0 or call.ndim(1) != ndim:
        return join(f"[x..], [i..]{', [s..]' if source else ''} -> [x..]", linear)
    table, index = (dims_text("x", ndim, {call.arg("dim") % ndim: name}) for name in ("v", "i" if adds else "[i]"))
    operands = f"{table}, {index}, {index}" if source else f"{table}, {index}"
    return join(f"{operands} -> {table}", linear, "ragged", "kernel v")


@without_communication
def scatter(call: LocalCall, shard: FactorShard) -> Tensor:
    """Write, add or reduce elements at the indices that this rank holds; the others go to an extra row, dropped."""
    dim, (index, hit) = call.sharded_dim, shifted(call["index"], shard)
    wide = functional(call)(self=with_extra_row(call["self"], dim), index=index.where(hit, shard.held))
    return wide.narrow(dim, 0, shard.held)


def take_rule(call: Call) -> str:
    """Return the rule: indices into a flat tensor."""
    if call.ndim(0) == 1:
        return "v, i.. -> i.. ; linear 0 ; kernel v"
    return "[x..], i.. -> i.. ; linear 0"


@without_communication
def take(call: LocalCall, shard: FactorShard) -> Tensor:
    """Look up the elements of a vector whose index this rank holds; the others are zeros in a sum."""
    tensor, (index, hit) = call["self"], shifted(call["index"], shard, wraps=True)
    if not shard.held:
        return no_summand(tensor, index.shape)
    return kept(hit, tensor.take(index.where(hit, 0)))


define("aten::gather", gather_rule, kernels=free(gather))
define(
    [f"aten::scatter.{how}" for how in ("src", "value", "reduce", "value_reduce")], scatter_rule, kernels=free(scatter)
)
define(("aten::scatter_add", "aten::scatter_reduce.two"), scatter_rule, kernels=free(scatter))
define("aten::take", take_rule, kernels=free(take))
define("aten::put", "[x..], [i..], [s..] -> [x..] ; linear 0+2", derivative_makes_tensors=True)

# ---- an index for every row -----------------------------------------------------------------------------------------


def index_select_rule(call: Call) -> str:
    """Return the rule: rows of a dim; an index without dims gives a row that keeps its dim."""
    ndim = call.ndim(0)
    if ndim == 0:
        return "[x..], [i..] -> [x..] ; linear 0"
    dim = call.arg("dim") % ndim
    table, result = (dims_text("x", ndim, {dim: name}) for name in ("v", "i" if call.ndim(1) else "1"))
    return join(f"{table}, {'i' if call.ndim(1) else ''} -> {result}", "linear 0", "kernel v")


@without_communication
def index_select(call: LocalCall, shard: FactorShard) -> Tensor:
    """Look up the rows whose index this rank holds; the others are zeros in a sum."""
    dim, (index, hit) = call.sharded_dim, shifted(call["index"], shard)
    if not shard.held:
        return no_summand(call["self"], call.local_shape())
    trailing = [1] * (call["self"].dim() - dim - 1)
    return kept(hit.reshape(-1, *trailing), call["self"].index_select(dim, index.where(hit, 0)))


def row_writes(adds: bool, clauses: str) -> Callable[[Call], str]:
    """Return the rule of an op that writes rows; where it adds, the rows written may be sharded."""

    def rule(call: Call) -> str:
        ndim = call.ndim(0)
        source = len(call.tensors) > 2 and call.tensors[2] is not None
        if ndim == 0 or call.ndim(1) == 0:
            return join(f"[x..], [i..]{', [s..]' if source else ''} -> [x..]", clauses)
        dim = call.arg("dim") % ndim
        rows = "i" if adds and source and call.ndim(2) else "[i]"
        table, written = (dims_text("x", ndim, {dim: name}) for name in ("v", rows))
        operands = [table, rows] + ([written if call.ndim(2) else ""] if source else [])
        return join(f"{', '.join(operands)} -> {table}", clauses, "kernel v")

    return rule


@without_communication
def index_write(call: LocalCall, shard: FactorShard) -> Tensor:
    """Write, add or reduce rows at the indices that this rank holds; the others go to an extra row, dropped."""
    wraps = "index_fill" in packet_name(call.func)
    dim, (index, hit) = call.sharded_dim, shifted(call["index"], shard, wraps)
    wide = functional(call)(self=with_extra_row(call["self"], dim), index=index.where(hit, shard.held))
    return wide.narrow(dim, 0, shard.held)


define("aten::index_select", index_select_rule, kernels=free(index_select))
define("aten::index_add", row_writes(True, "linear 0+2"), kernels=free(index_write))
define("aten::index_copy", row_writes(False, "linear 0+2"), kernels=free(index_write))
define(("aten::index_fill", "aten::index_reduce"), row_writes(False, ""), kernels=free(index_write), strides="as run")
define(
    "aten::index_fill_.int_Tensor",
    row_writes(False, ""),
    kernels=free(index_write),
    override=filling_integers_without_gradient,
)

# ---- indices that are searched for ----------------------------------------------------------------------------------


def searchsorted(call: Call) -> str:
    """Return the rule: one sorted sequence for all values, or one for each row of values."""
    values = "" if call.tensors[1] is None else "x.."
    if call.ndim(0) == 1:
        return f"[k], {values}, [k] -> {values or '_..'}"
    return "x.. [k], x.. v, x.. [k] -> x.. v"


define("aten::bucketize.Tensor", "x.., [k] -> x..")
define("aten::bucketize.Scalar", "[k] -> ")
define("aten::searchsorted.Tensor", searchsorted)
