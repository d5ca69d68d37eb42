"""Ops that move elements to other places: rolls, flips, pads, triangles, shuffles; and ranges of numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .._torch.decompositions import pytorch_decomposition
from .._torch.ops import packet_name
from ..notation.build import dims_text, join, kernel_clause
from .call import Call
from .kernel import FactorShard, Fetch, Kernel, KernelRun, LocalCall, clipped
from .op import Local
from .registry import definitions_in
from .views import MOVES

aten = torch.ops.aten
define = definitions_in(__name__)


def _list(value: int | Sequence[int]) -> list[int]:
    return [value] if isinstance(value, int) else list(value)


# ---- rolls, flips, turns --------------------------------------------------------------------------------------------


def along_dims(call: Call) -> str:
    """Return the rule of an op along several dims; with the kernel, any one of them may be sharded."""
    ndim = call.ndim(0)
    dims = sorted({dim % ndim for dim in _list(call.arg("dims"))}) if ndim else []
    if not dims and packet_name(call.op).startswith("aten::roll"):
        # Without dims the tensor is rolled as if it were flat.
        text = dims_text("x", ndim, dict.fromkeys(range(ndim), "_"))
        return join(f"{text} -> {text}", MOVES)
    text = dims_text("x", ndim, {dim: f"k{dim}" for dim in dims})
    return join(f"{text} -> {text}", MOVES, kernel_clause([f"k{dim}" for dim in dims]))


def roll(call: LocalCall, shard: FactorShard) -> KernelRun:
    """Fetch this rank's rows of the rolled dim: one run, or two where they wrap around the end."""
    dim, ndim = call.sharded_dim, call["self"].dim()
    pairs = [(by, axis % ndim) for by, axis in zip(_list(call["shifts"]), _list(call["dims"]), strict=True)]
    by = sum(shift for shift, axis in pairs if axis == dim)
    local = call["self"]
    others = [(shift, axis) for shift, axis in pairs if axis != dim]
    if others and local.numel():
        local = local.roll(*map(list, zip(*others, strict=True)))
    wanted = []
    for start, stop in shard.bounds:
        first = (start - by) % max(1, shard.size)
        last = first + stop - start
        wanted.append([(first, min(last, shard.size)), (0, last - shard.size)])
    return (yield Fetch(local, dim, shard.bounds, wanted))


def flip(call: LocalCall, shard: FactorShard) -> KernelRun:
    """Fetch the mirrored rows, and flip them."""
    dim = call.sharded_dim
    wanted = [(shard.size - stop, shard.size - start) for start, stop in shard.bounds]
    rows = yield Fetch(call["self"], dim, shard.bounds, wanted)
    return rows.flip(call["dims"])


def rot90(call: Call) -> str:
    """Return the rule: the two dims that turn must be replicated."""
    ndim, pair = call.ndim(0), [dim % call.ndim(0) for dim in call.arg("dims")]
    text = dims_text("x", ndim, dict.fromkeys(pair, "_"))
    return join(f"{text} -> {text}", MOVES)


define("aten::roll", along_dims, kernels={"k": Kernel(roll)}, strides="rolled")
define("aten::flip", along_dims, kernels={"k": Kernel(flip)})
define("aten::rot90", rot90)

# ---- pads -----------------------------------------------------------------------------------------------------------


def pad_rule(call: Call) -> str:
    """Return the rule: dims that are padded have a kernel. Padding by zeros is linear."""
    ndim, pads = call.ndim(0), list(call.arg("pad"))
    padded = [ndim - 1 - i // 2 for i in range(0, len(pads), 2) if pads[i] or pads[i + 1]]
    text = dims_text("x", ndim, {dim: f"k{dim}" for dim in padded})
    linear = "linear 0" if call.arg("value", 0) == 0 else ""
    return join(f"{text} -> {text}", linear, kernel_clause([f"k{dim}" for dim in sorted(padded)]))


def pad(call: LocalCall, shard: FactorShard) -> KernelRun:
    """Fetch this rank's rows of the padded dim, and pad where they reach beyond the ends."""
    dim, pads = call.sharded_dim, list(call["pad"])
    at = 2 * (call["self"].dim() - 1 - dim)
    target = shard.of(call.shapes[0][dim])
    shifted = [(start - pads[at], stop - pads[at]) for start, stop in target.bounds]
    wanted = [clipped(run, shard.size) for run in shifted]
    rows = yield Fetch(call["self"], dim, shard.bounds, wanted)
    (low, high), (first, last) = shifted[shard.piece], wanted[shard.piece]
    pads[at : at + 2] = (first - low, high - last) if last > first else (high - low, 0)
    return aten.constant_pad_nd.default(rows, pads, call["value"])


define("aten::constant_pad_nd", pad_rule, kernels={"k": Kernel(pad)}, reads_numbers=True)
for _n in (1, 2, 3):
    _dims = " ".join("_" * _n)
    _pads = [f"aten::{kind}_pad{_n}d" for kind in ("reflection", "replication")]
    define(_pads, f"b.. {_dims} -> b.. {_dims} ; linear 0", strides="channels last")
    _rule = f"b.. {_dims}, b.. {_dims} -> b.. {_dims} ; linear 0"
    define(
        [f"{name}_backward" for name in _pads], _rule, derivative_makes_tensors=True, strides="channels last of input"
    )

# ---- triangles ------------------------------------------------------------------------------------------------------


def triangle(call: LocalCall) -> Tensor:
    """Keep the triangle of this rank's block above or below the global diagonal."""
    tensor: Tensor = call["self"]
    rows, columns = call.layouts[0].runs(call.at)[-2:]
    if len(rows) == len(columns) == 1:
        return call.run(diagonal=call["diagonal"] + rows[0][0] - columns[0][0])
    i, j = (torch.tensor([n for run in runs for n in range(*run)], dtype=torch.long) for runs in (rows, columns))
    distance = (j - i[:, None] - call["diagonal"]).to(tensor.device)
    kept = distance <= 0 if packet_name(call.func).startswith("aten::tril") else distance >= 0
    if packet_name(call.func).endswith("_"):
        return tensor.masked_fill_(~kept, 0)
    return tensor.masked_fill(~kept, 0)


define(("aten::tril", "aten::triu"), "x.. -> x.. ; linear 0", local=Local(triangle))

# ---- shuffles -------------------------------------------------------------------------------------------------------


def shuffled(text: str, argument: str) -> Callable[[Call], str]:
    """Return the rule of a pixel shuffle: the factors `r` and `s` have the size of this argument."""

    def rule(call: Call) -> str:
        factor = call.arg(argument)
        return join(text, MOVES, f"r={factor}", f"s={factor}")

    return rule


define(
    "aten::pixel_shuffle",
    shuffled("b.. (c [r] [s]) h w -> b.. c (h [r]) (w [s])", "upscale_factor"),
    strides="channels last",
)
define("aten::pixel_unshuffle", shuffled("b.. c (h [r]) (w [s]) -> b.. (c [r] [s]) h w", "downscale_factor"))
define("aten::channel_shuffle", decomposition=pytorch_decomposition(aten.channel_shuffle.default))

# ---- ranges whose bounds are tensors of one number ------------------------------------------------------------------

for _kind in ("lin", "log"):
    define(f"aten::{_kind}space.Tensor_Tensor", ", -> _")
    define([f"aten::{_kind}space.{which}" for which in ("Tensor_Scalar", "Scalar_Tensor")], "-> _")
