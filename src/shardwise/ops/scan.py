"""Along a cut dim: running sums and extremes, and the k largest."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..notation import dims_text, whole_dims
from ..notation.build import normalized
from .call import Call
from .kernel import Cut, Gather, Kernel, KernelRun, LocalCall
from .tables import register

Combine = Callable[[Tensor, Tensor], Tensor]


def _slab(call: LocalCall, size: int) -> list[int]:
    """The shape of so many rows along the cut dim."""
    x, dim = call["self"], call.dims[0]
    return [size if d == dim else n for d, n in enumerate(x.shape)]


def _last(call: LocalCall, scanned: Tensor, cut: Cut, start: Any) -> Tensor:
    """The last row of a scan: what the following pieces need of it; `start` where this piece is empty."""
    if cut.held:
        return scanned.narrow(call.dims[0] or 0, cut.held - 1, 1)
    return scanned.new_full(_slab(call, 1), start)


def gather_both(one: Tensor, other: Tensor) -> KernelRun:
    """Two tensors of every piece, in one collective: as bytes, since their dtypes may differ."""
    raw = [tensor.contiguous().flatten().view(torch.uint8) for tensor in (one, other)]
    parts = yield Gather(torch.cat(raw))
    split = parts.split([part.numel() for part in raw], 1)
    return tuple(_seen_as(part, like) for part, like in zip(split, (one, other), strict=True))


def _seen_as(raw: Tensor, like: Tensor) -> Tensor:
    shape = (raw.shape[0], *like.shape)
    # PyTorch sees no other dtype in nothing.
    return raw.contiguous().view(like.dtype).view(shape) if raw.numel() else like.new_empty(shape)


def cumulate(start: float, combine: Combine) -> Callable[[LocalCall, Cut], KernelRun]:
    """A scan of each piece, combined with what all pieces before it come to."""

    def run(call: LocalCall, cut: Cut) -> KernelRun:
        scanned = call.run()
        lasts = yield Gather(_last(call, scanned, cut, start))
        if cut.piece == 0 or not cut.held:
            return scanned
        before = lasts[0]
        for last in lasts[1 : cut.piece]:
            before = combine(before, last)
        return combine(before, scanned).to(call.dtypes[0])

    return run


def _takes_over(new: Tensor, old: Tensor, largest: bool) -> Tensor:
    """Whether a later value is the running extreme: of equal ones the last is, and a NaN stays until the next NaN."""
    better = new >= old if largest else new <= old
    return better | (new != new) if new.dtype.is_floating_point else better


def cumulate_extreme(largest: bool) -> Callable[[LocalCall, Cut], KernelRun]:
    """Running extremes and their places."""

    def merge(before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        wins = _takes_over(after[0], before[0], largest)
        return torch.where(wins, after[0], before[0]), torch.where(wins, after[1], before[1])

    def run(call: LocalCall, cut: Cut) -> KernelRun:
        values, places = call.run()
        places = places + cut.start
        lasts = _last(call, values, cut, 0), _last(call, places, cut, 0)
        last_values, last_places = yield from gather_both(*lasts)
        found = values, places
        if cut.held and cut.piece:
            before = last_values[0], last_places[0]  # the first piece of a cut is never empty
            for piece, (start, stop) in enumerate(cut.bounds[1 : cut.piece], 1):
                if start < stop:
                    before = merge(before, (last_values[piece], last_places[piece]))
            found = merge(before, found)
        return found

    return run


def topk(call: LocalCall, cut: Cut) -> KernelRun:
    """The k best of each piece's k best."""
    x, dim, k, largest = call["self"], call.dims[0] or 0, call["k"], call["largest"]
    held = [min(k, stop - start) for start, stop in cut.bounds]
    most = max(held)
    values, places = x.topk(min(k, cut.held), dim, largest)
    room = _slab(call, most - values.shape[dim])
    places = places + cut.start
    padded = [torch.cat([found, found.new_zeros(room)], dim) for found in (values, places)]
    every_value, every_place = yield from gather_both(*padded)

    def joined(pieces: Tensor) -> Tensor:
        return torch.cat([piece.narrow(dim, 0, n) for piece, n in zip(pieces, held, strict=True)], dim)

    best, which = joined(every_value).topk(k, dim, largest, call["sorted"])
    return best, joined(every_place).gather(dim, which)


def _scanned(outputs: int, *clauses: str) -> Callable[[Call], str]:
    def rule(call: Call) -> str:
        ndim = call.ndim(0)
        dims = normalized(ndim, call.arg("dim"))
        text = dims_text("x", ndim, dict.fromkeys(dims, "k"))
        return " ; ".join((f"{text} -> {', '.join([text] * outputs)}", *clauses, *(["kernel k"] if dims else [])))

    return rule


def _topk_rule(call: Call) -> str:
    ndim = call.ndim(0)
    dims = normalized(ndim, call.arg("dim"))
    operand, result = (dims_text("x", ndim, dict.fromkeys(dims, mark)) for mark in ("k", "_"))
    return f"{operand} -> {result}, {result}" + (" ; reduce none ; kernel k" if dims else "")


def _exponents_rule(call: Call) -> str:
    if call.tensors[0].dtype.is_complex:  # which of the many logarithms comes out depends on all numbers before
        dims = whole_dims("x", call.ndim(0), call.arg("dim"))
        return f"{dims} -> {dims}"
    return _scanned(1)(call)


# What is exchanged is one row of each piece.
_ROWS = 0.02
register("aten::cumsum", _scanned(1, "linear 0"), {"k": Kernel(cumulate(0, torch.add), traffic=_ROWS)})
register("aten::cumprod", _scanned(1), {"k": Kernel(cumulate(1, torch.mul), traffic=_ROWS)})
register("aten::logcumsumexp", _exponents_rule, {"k": Kernel(cumulate(-math.inf, torch.logaddexp), traffic=_ROWS)})
register("aten::cummax", _scanned(2), {"k": Kernel(cumulate_extreme(True), traffic=_ROWS)})
register("aten::cummin", _scanned(2), {"k": Kernel(cumulate_extreme(False), traffic=_ROWS)})
register("aten::topk", _topk_rule, {"k": Kernel(topk, traffic=4.0)})
