"""Boxes of local tensors, packed one after the other for an all-to-all and unpacked again."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .boxes import Box


def pack_boxes(local: Tensor, boxes_by_peer: Sequence[Sequence[Box]]) -> Tensor:
    """Return the elements of these boxes of a local tensor as one vector."""
    pieces = [sent_box(local, box).reshape(-1) for boxes in boxes_by_peer for box in boxes]
    return torch.cat(pieces) if pieces else local.new_empty(0)


def unpack_boxes(received: Tensor, boxes_by_peer: Sequence[Sequence[Box]], shape: Sequence[int]) -> Tensor:
    """Return a local tensor of this shape, its boxes filled one after the other from a vector."""
    result = received.new_empty(shape)
    start = 0
    for boxes in boxes_by_peer:
        for box in boxes:
            lengths = [length for _, _, length in box]
            stop = start + math.prod(lengths)
            received_box(result, box).copy_(received[start:stop].view(lengths))
            start = stop
    return result


def sent_box(tensor: Tensor, box: Box) -> Tensor:
    """Return a view of a box in the sender's local tensor."""
    for dim, (offset, _, length) in enumerate(box):
        if length != tensor.shape[dim]:
            tensor = tensor.narrow(dim, offset, length)
    return tensor


def received_box(tensor: Tensor, box: Box) -> Tensor:
    """Return a view of a box in the receiver's local tensor."""
    for dim, (_, offset, length) in enumerate(box):
        if length != tensor.shape[dim]:
            tensor = tensor.narrow(dim, offset, length)
    return tensor


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor as a vector, to send a dtype that some backend does not move."""
    # The stride of a single element may be anything; that of a new dim is 1.
    return tensor.contiguous().unsqueeze(-1).view(-1).view(torch.uint8)
