"""Running sums and extremes along a sharded dim, and reductions of segments."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .._torch.above_autograd import Keys, call_original
from .._torch.ops import OpOverload
from ..comm.packing import as_bytes
from ..notation import dims_text, replicated_dims
from ..notation.build import normalized
from .above_autograd import where_distributed
from .call import Call
from .kernel import FactorShard, Gather, Kernel, KernelRun, LocalCall, Steps
from .registry import definitions_in

define = definitions_in(__name__)

Combine = Callable[[Tensor, Tensor], Tensor]


def slab(call: LocalCall, size: int) -> list[int]:
    """Return the local shape of the operand with `size` rows along the sharded dim."""
    x, dim = call["self"], call.dims[0]
    return [size if d == dim else n for d, n in enumerate(x.shape)]


def _last(call: LocalCall, scanned: Tensor, shard: FactorShard, start: float) -> Tensor:
    """Return the last row of a scan, which the following shards need; `start` where this shard is empty."""
    if shard.held:
        return scanned.narrow(call.dims[0] or 0, shard.held - 1, 1)
    return scanned.new_full(slab(call, 1), start)


def gather_both(one: Tensor, other: Tensor) -> Steps[tuple[Tensor, Tensor]]:
    """Gather two tensors of every rank in one collective, as bytes since their dtypes may differ."""
    raw = [as_bytes(tensor) for tensor in (one, other)]
    parts = yield Gather(torch.cat(raw))
    ones, others = parts.split([part.numel() for part in raw], 1)
    return _seen_as(ones, one), _seen_as(others, other)


def _seen_as(raw: Tensor, like: Tensor) -> Tensor:
    shape = (raw.shape[0], *like.shape)
    # PyTorch cannot view an empty tensor as another dtype, nor bytes that start in the middle of a number: copy them.
    raw = raw.clone(memory_format=torch.contiguous_format)
    return raw.view(like.dtype).view(shape) if raw.numel() else like.new_empty(shape)


def cumulate(start: float, combine: Combine) -> Callable[[LocalCall, FactorShard], KernelRun]:
    """Return the kernel that scans each shard, and combines it with the total of all shards before it."""

    def run(call: LocalCall, shard: FactorShard) -> KernelRun:
        scanned = call.run()
        lasts = yield Gather(_last(call, scanned, shard, start))
        if shard.piece == 0 or not shard.held:
            return scanned
        before = lasts[0]
        for last in lasts[1 : shard.piece]:
            before = combine(before, last)
        return combine(before, scanned).to(call.dtypes[0])

    return run


def _takes_over(new: Tensor, old: Tensor, largest: bool) -> Tensor:
    """Return whether a later value replaces the running extreme: an equal one does, and so does a NaN."""
    better = new >= old if largest else new <= old
    return better | (new != new) if new.dtype.is_floating_point else better


def cumulate_extreme(largest: bool) -> Callable[[LocalCall, FactorShard], KernelRun]:
    """Return the kernel of running extremes and their indices."""

    def merge(before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        wins = _takes_over(after[0], before[0], largest)
        return torch.where(wins, after[0], before[0]), torch.where(wins, after[1], before[1])

    def run(call: LocalCall, shard: FactorShard) -> KernelRun:
        values, places = call.run()
        places = places + shard.start
        lasts = _last(call, values, shard, 0), _last(call, places, shard, 0)
        last_values, last_places = yield from gather_both(*lasts)
        found = values, places
        if shard.held and shard.piece:
            before = last_values[0], last_places[0]  # the first piece is never empty
            for piece, (start, stop) in enumerate(shard.bounds[1 : shard.piece], 1):
                if start < stop:
                    before = merge(before, (last_values[piece], last_places[piece]))
            found = merge(before, found)
        return found

    return run


def scan_rule(outputs: int, *clauses: str) -> Callable[[Call], str]:
    """Return the rule of a scan along a dim, which has a kernel."""

    def rule(call: Call) -> str:
        ndim = call.ndim(0)
        dims = normalized(ndim, call.arg("dim"))
        text = dims_text("x", ndim, dict.fromkeys(dims, "k"))
        return " ; ".join((f"{text} -> {', '.join([text] * outputs)}", *clauses, *(["kernel k"] if dims else [])))

    return rule


def logcumsumexp_rule(call: Call) -> str:
    """Return the rule: a scan; of complex numbers along a replicated dim only."""
    if call.tensors[0].dtype.is_complex:  # the branch of a complex logarithm depends on all numbers before
        dims = replicated_dims("x", call.ndim(0), call.arg("dim"))
        return f"{dims} -> {dims}"
    return scan_rule(1)(call)


_ROWS = 0.02  # one row of each shard is exchanged
define("aten::cumsum", scan_rule(1, "linear 0"), kernels={"k": Kernel(cumulate(0, torch.add), traffic=_ROWS)})
define(
    "aten::cumprod",
    scan_rule(1),
    kernels={"k": Kernel(cumulate(1, torch.mul), traffic=_ROWS)},
    derivative_makes_tensors=True,
)
define(
    "aten::logcumsumexp",
    logcumsumexp_rule,
    kernels={"k": Kernel(cumulate(-math.inf, torch.logaddexp), traffic=_ROWS)},
)
define(
    "aten::cummax",
    scan_rule(2),
    kernels={"k": Kernel(cumulate_extreme(True), traffic=_ROWS)},
    derivative_makes_tensors=True,
)
define(
    "aten::cummin",
    scan_rule(2),
    kernels={"k": Kernel(cumulate_extreme(False), traffic=_ROWS)},
    derivative_makes_tensors=True,
)

# ---- functions that PyTorch composes of other ops -------------------------------------------------------------------


def _vander(func: OpOverload) -> Callable[..., object]:
    """Return the override of `torch.vander`: PyTorch writes the powers into a plain tensor."""

    def run(keys: Keys, x: Tensor, N: int | None = None, increasing: bool = False) -> object:
        count = x.shape[0] if x.dim() == 1 and N is None else N
        if x.dim() != 1 or count is None or count < 0:
            return call_original(func, keys, x, N, increasing)  # raises the error
        base = x.to(torch.promote_types(x.dtype, torch.int64)).unsqueeze(1)
        factors = torch.cat([torch.ones_like(base), base.expand(-1, max(count - 1, 0))], 1)
        powers = factors.narrow(1, 0, count).cumprod(1)
        return powers if increasing else powers.flip(1)

    return where_distributed(func, run)


define("aten::vander", override=_vander)
define(("aten::trapezoid", "aten::trapz"), makes_tensors=True)  # zeros for empty operands

# ---- segments -------------------------------------------------------------------------------------------------------


def segments(call: Call) -> str:
    """Return the rule: runs of rows along an axis, each reduced by itself: the axis must be replicated."""
    data, ends = _segments(call, call.ndim(0))
    return f"{data}, {ends}, _.., {ends} -> {data}"


def segments_backward(call: Call) -> str:
    """Return the rule: the gradient of `segment_reduce`."""
    data, ends = _segments(call, call.ndim(2))
    return f"{data}, {data}, {data}, {ends}, {ends} -> {data} ; linear 0"


def _segments(call: Call, ndim: int) -> tuple[str, str]:
    axis = call.arg("axis") % ndim
    before = " ".join(f"x{d}" for d in range(axis))
    return dims_text("x", ndim, {axis: "_"}), f"{before} _".strip()


define("aten::segment_reduce", segments)
define("aten::_segment_reduce_backward", segments_backward)
