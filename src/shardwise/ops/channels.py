"""Tensors with channels in dim 1, and values with one number for each channel."""

from __future__ import annotations

from torch import Tensor


def per_channel(values: Tensor, like: Tensor) -> Tensor:
    """Return one value for each channel, in a shape that broadcasts against `like`."""
    return values.view(-1, *[1] * (like.dim() - 2))


def dims_but_channels(x: Tensor) -> list[int]:
    """Return all dims but that of the channels."""
    return [dim for dim in range(x.dim()) if dim != 1]
