"""Convolutions along a cut spatial dim: each rank fetches the rows its outputs look at, and hands gradients back.

A window may reach over several ranks, or lie in the padding alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..sharding.layout import Run
from .conv import convolution, convolution_backward
from .kernel import Cut, Fetch, Kernel, KernelRun, LocalCall, Return
from .tables import LOCAL, register

_pad = torch.ops.aten.constant_pad_nd.default


class Windows:
    """Which input rows the outputs of each rank look at, and the arguments for them alone."""

    def __init__(self, call: LocalCall, dim: int, rows: int, outputs: Sequence[Run]) -> None:
        self.axis, self.dim, self.call = dim - 2, dim, call
        self.stride, self.padding, self.reach = (
            _of(call["stride"], self.axis),
            _of(call["padding"], self.axis),
            _of(call["dilation"], self.axis) * (call["weight"].shape[dim] - 1),
        )
        self.transposed, self.rows = call["transposed"], rows
        self.outputs = outputs
        self.wanted = [self._rows(run) for run in outputs]
        self.held = [_clipped(run, rows) for run in self.wanted]

    def _rows(self, run: Run) -> Run:
        """The rows behind a run of outputs, those in the padding too."""
        first, last = run[0], run[1] - 1
        if last < first:
            return 0, 0
        if not self.transposed:
            start = first * self.stride - self.padding
            return start, last * self.stride - self.padding + self.reach + 1
        start = -((self.reach - first - self.padding) // self.stride)
        return _clipped((start, (last + self.padding) // self.stride + 1), self.rows)

    def padded(self, rows: Tensor, piece: int) -> Tensor:
        """The rows of a rank's window, with zeros for the padding."""
        (start, stop), (low, high) = self.wanted[piece], self.held[piece]
        return _padded(rows, self.dim, (low - start, stop - high) if high > low else (stop - start, 0))

    def unpadded(self, gradient: Tensor, piece: int) -> Tensor:
        """The rows of a window that exist."""
        (start, _), (low, high) = self.wanted[piece], self.held[piece]
        return gradient.narrow(self.dim, low - start if high > low else 0, high - low)

    def arguments(self) -> dict[str, Any]:
        """The op's arguments for a window: its padding is in it."""
        return {
            "padding": _without(self.call["padding"], self.axis, self.call["input"].dim() - 2),
            "output_padding": _without(self.call["output_padding"], self.axis, self.call["input"].dim() - 2),
        }

    def trim(self, piece: int, length: int) -> tuple[int, int]:
        """How many rows a transposed window yields too few (or, negative, too many) at both ends."""
        (first, last), (start, _) = self.outputs[piece], self.held[piece]
        begin = first + self.padding - start * self.stride
        return -begin, begin + last - first - length


def forward(call: LocalCall, cut: Cut) -> KernelRun:
    """The outputs of a rank, from the rows they look at."""
    dim = call.dims[0]
    assert dim is not None
    outputs = cut.of(call.shapes[0][dim]).bounds
    windows = Windows(call, dim, cut.size, outputs)
    rows = yield Fetch(call["input"], dim, cut.bounds, windows.held)
    first, last = outputs[cut.piece]
    shape = call.local_shape()
    if last == first or not rows.numel() or not call["weight"].numel():
        return _nothing(call, rows, shape)
    if not windows.transposed:
        return call.run(input=windows.padded(rows, cut.piece), **windows.arguments())
    result = call.run(input=rows, bias=None, **windows.arguments())
    result = _padded(result, dim, windows.trim(cut.piece, result.shape[dim]))
    return result if call["bias"] is None else result + _as_channels(call["bias"], result.dim())


def backward(call: LocalCall, cut: Cut) -> KernelRun:
    """Gradients of what a rank's outputs looked at; rows go back to where they came from."""
    dim = call.dims[1]
    assert dim is not None
    rows_held = cut.of(call.given[1].shape[dim]).bounds
    outputs = cut.of(call.given[0].shape[dim]).bounds
    windows = Windows(call, dim, call.given[1].shape[dim], outputs)
    rows = yield Fetch(call["input"], dim, rows_held, windows.held)
    gradient, mask = call["grad_output"], call["output_mask"]
    first, last = outputs[cut.piece]
    shape = list(rows.shape)
    if last == first or not rows.numel() or not gradient.numel() or not call["weight"].numel():
        weight = torch.zeros_like(call["weight"]) if mask[1] else None
        # Outputs that see nothing but padding have a bias, too.
        bias = gradient.sum([d for d in range(gradient.dim()) if d != 1]) if mask[2] else None
        found: tuple[Any, ...] = (rows.new_zeros(shape), weight, bias)
    else:
        window = rows if windows.transposed else windows.padded(rows, cut.piece)
        if windows.transposed:
            length = (rows.shape[dim] - 1) * windows.stride + windows.reach + 1
            before, after = windows.trim(cut.piece, length)
            gradient = _padded(gradient, dim, (-before, -after))
        found = call.run(grad_output=gradient, input=window, **windows.arguments())
        if windows.transposed and mask[2]:
            # Rows that output_padding adds are cropped from the window, but not from the bias's gradient.
            found = (*found[:2], call["grad_output"].sum([d for d in range(gradient.dim()) if d != 1]))
        if mask[0] and not windows.transposed:
            found = (windows.unpadded(found[0], cut.piece), *found[1:])
    if not mask[0]:
        return None, *found[1:]
    returned = yield Return(found[0], dim, rows_held, windows.held)
    return returned, *found[1:]


def channels_backward(call: LocalCall, cut: Cut) -> KernelRun:
    """With input channels cut, every rank finds the whole gradient of the bias: the first gives it."""
    results = list(local_backward(call))
    if results[2] is not None and cut.piece != 0:
        results[2] = torch.zeros_like(results[2])
    return tuple(results)
    yield


# ---- no spatial dim is cut -------------------------------------------------------------------------------------------


def local_forward(call: LocalCall) -> Tensor:
    """The op, unless this rank has nothing to convolve: then the bias is all."""
    if call["input"].numel() and call["weight"].numel():
        return call.run()
    return _nothing(call, call["input"], call.local_shape())


def local_backward(call: LocalCall) -> tuple[Any, ...]:
    """The op, unless this rank has nothing."""
    gradient, mask = call["grad_output"], call["output_mask"]
    if gradient.numel() and call["input"].numel() and call["weight"].numel():
        return tuple(call.run())
    bias = gradient.sum([d for d in range(gradient.dim()) if d != 1]) if mask[2] else None
    there = torch.zeros_like(call["input"]) if mask[0] else None
    return there, torch.zeros_like(call["weight"]) if mask[1] else None, bias


def _nothing(call: LocalCall, like: Tensor, shape: Sequence[int]) -> Tensor:
    result = like.new_zeros(shape)
    return result if call["bias"] is None else result + _as_channels(call["bias"], len(shape))


def _as_channels(bias: Tensor, ndim: int) -> Tensor:
    return bias.view(-1, *[1] * (ndim - 2))


def _of(values: Sequence[int], axis: int) -> int:
    return values[axis] if len(values) > 1 else values[0]


def _without(values: Sequence[int], axis: int, count: int) -> list[int]:
    """Padding for all spatial dims but one."""
    return [0 if i == axis else _of(values, i) for i in range(count)]


def _clipped(run: Run, size: int) -> Run:
    low, high = (min(max(edge, 0), size) for edge in run)
    return (low, high) if high > low else (0, 0)


def _padded(tensor: Tensor, dim: int, by: tuple[int, int]) -> Tensor:
    return _pad(tensor, [0, 0] * (tensor.dim() - 1 - dim) + list(by), 0) if any(by) else tensor


_HALO = 0.25  # of what a rank holds, as a rule of thumb for the planner
register("aten::convolution", convolution, kernels={"y": Kernel(forward, 1, _HALO)})
register(
    "aten::convolution_backward",
    convolution_backward,
    kernels={"y": Kernel(backward, 2, _HALO), "c": Kernel(channels_backward, 0, 0.0)},
)
LOCAL["aten::convolution"] = local_forward
LOCAL["aten::convolution_backward"] = local_backward
