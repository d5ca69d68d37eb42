"""Convolutions. Batch, groups and output channels may be sharded freely; sharded input channels give partial sums.

Channels are (g c) and (g o): groups, and channels within a group. If a spatial dim y0, y1, ... is sharded, each rank
fetches the input rows in the windows of its outputs (the halo); backward returns the gradients of these rows to their
owners. A window may reach over several ranks, or lie in the padding only. The weight's spatial dims must be replicated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..notation.build import join, kernel_clause
from ..sharding.layout import Run
from .call import Call
from .channels import dims_but_channels, per_channel
from .kernel import FactorShard, Fetch, Kernel, KernelRun, LocalCall, Return, clipped, without_communication
from .op import Local
from .registry import definitions_in

define = definitions_in(__name__)

Gradients = tuple[Tensor | None, ...]
"""The gradients of input, weight and bias; None for those that the caller did not request."""


# ---- rules ----------------------------------------------------------------------------------------------------------


class _Patterns(NamedTuple):
    input: str
    weight: str
    output: str
    bias: str
    groups: str
    spatial: list[str]


def _patterns(call: Call, ndim: int) -> _Patterns:
    """Return the patterns of one convolution of tensors with `ndim` dims, including batch and channels."""
    spatial = [f"y{i}" for i in range(ndim - 2)]
    window = " ".join(f"[k{i}]" for i in range(ndim - 2))
    grouped = call.arg("groups") != 1
    into, out = ("(g c)", "(g o)") if grouped else ("c", "o")
    weight = f"{into} o" if call.arg("transposed") else f"{out} c"
    rows = " ".join(spatial)
    return _Patterns(
        input=f"n {into} {rows}",
        weight=f"{weight} {window}",
        output=f"n {out} {rows}",
        bias=out,
        groups="groups=(g)" if grouped else "",
        spatial=spatial,
    )


def _forward_rule(call: Call) -> str:
    """Return the rule: linear in the input and the bias together, and in the weight and the bias together."""
    p = _patterns(call, call.ndim(0))
    sides = f"{p.input}, {p.weight}, {p.bias} -> {p.output}"
    return join(sides, "linear 0+2 | 1+2", p.groups, kernel_clause(p.spatial))


def _backward_rule(call: Call) -> str:
    """Return the rule: linear in the gradient.

    The bias has no input channels `c`, so a kernel counts its gradient once.
    """
    p = _patterns(call, call.ndim(1))
    sides = f"{p.output}, {p.input}, {p.weight} -> {p.input}, {p.weight}, {p.bias}"
    sizes = f"bias_sizes=({p.bias})" if call.arg("output_mask")[2] else ""
    return join(sides, "linear 0", sizes, p.groups, kernel_clause([*p.spatial, "c"]))


# ---- no spatial dim is sharded --------------------------------------------------------------------------------------


def _run_forward(call: LocalCall) -> Tensor:
    """Run the op; if there is nothing to convolve on this rank, return the bias."""
    if call["input"].numel() and call["weight"].numel():
        result: Tensor = call.run()
        return result
    return _only_bias(call)


def _run_backward(call: LocalCall) -> Gradients:
    """Run the op; if there is nothing to convolve on this rank, only the bias has a gradient."""
    if call["grad_output"].numel() and call["input"].numel() and call["weight"].numel():
        return _requested(call)
    return _only_bias_gradient(call, call["input"])


def _requested(call: LocalCall, **changed: object) -> Gradients:
    """Run the op, and drop what was not requested: some of its kernels return the weight's gradient with the bias's."""
    of_input, of_weight, bias = call.run(**changed)
    mask = call["output_mask"]
    return of_input if mask[0] else None, of_weight if mask[1] else None, bias if mask[2] else None


@without_communication
def channels_backward(call: LocalCall, shard: FactorShard) -> Gradients:
    """Run with sharded input channels: every rank computes the same gradient of the bias, so only the first adds it."""
    of_input, of_weight, bias = _run_backward(call)
    if bias is not None and shard.piece != 0:
        bias = torch.zeros_like(bias)
    return of_input, of_weight, bias


def _only_bias(call: LocalCall) -> Tensor:
    result = call.zeros(call["input"])
    return result if call["bias"] is None else result + per_channel(call["bias"], result)


def _only_bias_gradient(call: LocalCall, input: Tensor) -> Gradients:
    """Return the gradients on a rank without input rows.

    Zeros, but the bias counts in outputs over padding alone, too.
    """
    mask = call["output_mask"]
    of_input = torch.zeros_like(input) if mask[0] else None
    of_weight = torch.zeros_like(call["weight"]) if mask[1] else None
    return of_input, of_weight, _bias_gradient(call) if mask[2] else None


def _bias_gradient(call: LocalCall) -> Tensor:
    gradient: Tensor = call["grad_output"]
    return gradient.sum(dims_but_channels(gradient))


# ---- a spatial dim is sharded ---------------------------------------------------------------------------------------


class _Windows:
    """The rows of the input that the outputs of each rank depend on, along a sharded spatial dim.

    `wanted` are the rows of each rank, including those in the padding; `existing` are those within the input.
    """

    def __init__(self, call: LocalCall, dim: int, size: int, outputs: Sequence[Run]) -> None:
        self.call, self.dim, self.size, self.outputs = call, dim, size, outputs
        self.axis = dim - 2
        self.stride, self.padding = (_entry(call[name], self.axis) for name in ("stride", "padding"))
        self.reach = _entry(call["dilation"], self.axis) * (call["weight"].shape[dim] - 1)
        self.transposed: bool = call["transposed"]
        self.wanted = [self._rows(run) for run in outputs]
        self.existing = [clipped(run, size) for run in self.wanted]

    def _rows(self, run: Run) -> Run:
        """Return the rows that a run of outputs depends on."""
        first, last = run[0], run[1] - 1
        if last < first:
            return 0, 0
        if not self.transposed:
            start = first * self.stride - self.padding
            return start, last * self.stride - self.padding + self.reach + 1
        start = -((self.reach - first - self.padding) // self.stride)
        return clipped((start, (last + self.padding) // self.stride + 1), self.size)

    def padded(self, rows: Tensor, piece: int) -> Tensor:
        """Return the existing rows of a rank, with zeros for the padding."""
        (start, stop), (low, high) = self.wanted[piece], self.existing[piece]
        return _padded(rows, self.dim, (low - start, stop - high) if high > low else (stop - start, 0))

    def unpadded(self, gradient: Tensor, piece: int) -> Tensor:
        """Return the gradient of the existing rows of a rank, cropped from that of its padded rows."""
        (start, _), (low, high) = self.wanted[piece], self.existing[piece]
        return gradient.narrow(self.dim, low - start if high > low else 0, high - low)

    def arguments(self) -> dict[str, list[int]]:
        """Return the arguments of the op that change: along the sharded dim, the rows include the padding."""
        spatial = range(self.call["input"].dim() - 2)
        return {
            name: [0 if i == self.axis else _entry(self.call[name], i) for i in spatial]
            for name in ("padding", "output_padding")
        }

    def missing(self, piece: int, length: int) -> tuple[int, int]:
        """Return how many outputs of a rank are missing at both ends of the `length` that a transposed op computes.

        Negative numbers are outputs that belong to other ranks.
        """
        (first, stop), (start, _) = self.outputs[piece], self.existing[piece]
        begin = first + self.padding - start * self.stride
        return -begin, begin + stop - first - length


def halo_forward(call: LocalCall, shard: FactorShard) -> KernelRun:
    """Compute the outputs of a rank from the rows that they depend on."""
    dim = call.dims[0]
    assert dim is not None
    outputs = shard.of(call.shapes[0][dim]).bounds
    windows = _Windows(call, dim, shard.size, outputs)
    rows = yield Fetch(call["input"], dim, shard.bounds, windows.existing)
    first, stop = outputs[shard.piece]
    if stop == first or not rows.numel() or not call["weight"].numel():
        return _only_bias(call)
    if not windows.transposed:
        return call.run(input=windows.padded(rows, shard.piece), **windows.arguments())
    result = call.run(input=rows, bias=None, **windows.arguments())
    result = _padded(result, dim, windows.missing(shard.piece, result.shape[dim]))
    return result if call["bias"] is None else result + per_channel(call["bias"], result)


def halo_backward(call: LocalCall, shard: FactorShard) -> KernelRun:
    """Compute the gradients of the rows that a rank's outputs depend on, and return them to their owners."""
    dim = call.dims[1]
    assert dim is not None
    size = call.given[1].shape[dim]
    held, outputs = shard.of(size).bounds, shard.of(call.given[0].shape[dim]).bounds
    windows = _Windows(call, dim, size, outputs)
    rows = yield Fetch(call["input"], dim, held, windows.existing)
    first, stop = outputs[shard.piece]
    if stop == first or not rows.numel() or not call["grad_output"].numel() or not call["weight"].numel():
        of_rows, *others = _only_bias_gradient(call, rows)
    else:
        of_rows, *others = _window_gradients(call, windows, rows, shard.piece)
    if of_rows is None:
        return None, *others
    returned = yield Return(of_rows, dim, held, windows.existing)
    return returned, *others


def _window_gradients(call: LocalCall, windows: _Windows, rows: Tensor, piece: int) -> Gradients:
    """Return the gradients that the outputs of one rank contribute to its rows, the weight and the bias."""
    if not windows.transposed:
        of_rows, *others = _requested(call, input=windows.padded(rows, piece), **windows.arguments())
        return None if of_rows is None else windows.unpadded(of_rows, piece), *others
    length = (rows.shape[windows.dim] - 1) * windows.stride + windows.reach + 1
    before, after = windows.missing(piece, length)
    gradient = _padded(call["grad_output"], windows.dim, (-before, -after))
    of_rows, of_weight, _ = _requested(call, grad_output=gradient, input=rows, **windows.arguments())
    # Outputs that output_padding adds are cropped from `gradient`, but they count in the gradient of the bias.
    return of_rows, of_weight, _bias_gradient(call) if call["output_mask"][2] else None


def _entry(values: Sequence[int], axis: int) -> int:
    """Return the entry of an argument for a spatial dim; a single entry is for all dims."""
    return values[axis] if len(values) > 1 else values[0]


def _padded(tensor: Tensor, dim: int, by: tuple[int, int]) -> Tensor:
    """Return the tensor with zeros added at both ends of a dim; negative numbers crop it."""
    pad = torch.ops.aten.constant_pad_nd.default
    return pad(tensor, [0, 0] * (tensor.dim() - 1 - dim) + list(by), 0) if any(by) else tensor


_HALO = 0.25  # bytes of the halo as a multiple of the local outputs: a rule of thumb for the planner

define(
    "aten::convolution",
    _forward_rule,
    kernels={"y": Kernel(halo_forward, 1, _HALO)},
    local=Local(_run_forward),
    strides="convolution",
)
define(
    "aten::convolution_backward",
    _backward_rule,
    kernels={"y": Kernel(halo_backward, 2, _HALO), "c": Kernel(channels_backward, 0, 0.0)},
    local=Local(_run_backward),
)
