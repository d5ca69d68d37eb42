"""Run routes: move the elements of one or more tensors, by all-to-alls of bounded size.

What a rank holds already is copied from shard to shard. The rest is packed, exchanged and unpacked, round by round.
Packing and unpacking also convert dtypes, so that no other copies are made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._torch.collectives import all_to_all, wait
from ..world import RankTensor
from .boxes import Box, cut_boxes, volume
from .on_ranks import joined_sizes
from .packing import received_box, sent_box
from .rank_group import RankGroup
from .routes import Messages, Route
from .transport import moves_natively

Shards = Mapping[int, Tensor]
"""Local shards by rank."""


class Load(NamedTuple):
    """A tensor to move: its route, and the source and target shards that this process holds."""

    route: Route
    source: Shards
    target: Shards


class Slice(NamedTuple):
    """What is sent of a load in one round: slice number `turn`, of `turns`, of every message."""

    load: Load
    turn: int = 0
    turns: int = 1

    def boxes(self, messages: Messages, peer: int) -> Sequence[Box]:
        """Return the boxes of this slice in the message to or from a peer."""
        boxes = messages.get(peer, ())
        if self.turns == 1 or not boxes:
            return boxes
        total = volume(boxes)
        return tuple(cut_boxes(boxes, total * self.turn // self.turns, total * (self.turn + 1) // self.turns))


def copy_own(load: Load) -> None:
    """Copy the elements that ranks need and already hold."""
    for rank, target in load.target.items():
        for box in load.route.own(rank):
            received_box(target, box).copy_(sent_box(load.source[rank], box))


def start_round(
    slices: Sequence[Slice], group: RankGroup, dtype: torch.dtype, device: torch.device
) -> Callable[[], None]:
    """Start an all-to-all of these slices in this dtype, and return a function that waits for it and unpacks."""
    native = moves_natively(dtype)
    unit = 1 if native else dtype.itemsize
    buffers, outgoing, incoming = [], [], []
    for rank in group.here:
        peers = group.peers(rank)
        out = [[(each.load.source, each.boxes(each.load.route.sends(rank), peer)) for each in slices] for peer in peers]
        buffers.append(_packed([piece for of_peer in out for piece in of_peer], rank, dtype, device))
        outgoing.append([unit * sum(volume(boxes) for _, boxes in of_peer) for of_peer in out])
        incoming.append([unit * size for size in _received_sizes(slices, rank, peers)])
    if not native:
        buffers = [buffer.view(torch.uint8) for buffer in buffers]
    packed = RankTensor(buffers) if group.simulated else buffers[0]
    under_way = all_to_all(packed, joined_sizes(incoming), joined_sizes(outgoing), group.name)
    del packed, buffers

    def finish() -> None:
        received = wait(under_way)
        for rank, got in zip(group.here, received.shards if group.simulated else (received,), strict=True):
            _unpack(slices, rank, group.peers(rank), got if native else got.view(dtype))

    return finish


def _received_sizes(slices: Sequence[Slice], rank: int, peers: Sequence[int]) -> list[int]:
    return [sum(volume(each.boxes(each.load.route.receives(rank), peer)) for each in slices) for peer in peers]


def _packed(pieces: list[tuple[Shards, Sequence[Box]]], rank: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    buffer = torch.empty(sum(volume(boxes) for _, boxes in pieces), dtype=dtype, device=device)
    start = 0
    for shards, boxes in pieces:
        for box in boxes:
            view, start = _next(buffer, box, start)
            view.copy_(sent_box(shards[rank], box))
    return buffer


def _unpack(slices: Sequence[Slice], rank: int, peers: Sequence[int], received: Tensor) -> None:
    start = 0
    for peer in peers:
        for each in slices:
            for box in each.boxes(each.load.route.receives(rank), peer):
                view, start = _next(received, box, start)
                received_box(each.load.target[rank], box).copy_(view)


def _next(buffer: Tensor, box: Box, start: int) -> tuple[Tensor, int]:
    """Return the view of a buffer for a box that starts there, and where the next box starts."""
    lengths = [length for _, _, length in box]
    stop = start + math.prod(lengths)
    return buffer[start:stop].view(lengths), stop


# ---- rounds ---------------------------------------------------------------------------------------------------------


def staged(routes: Sequence[Route]) -> int:
    """Return the most elements that any rank sends and receives on these routes together."""
    totals: dict[int, int] = {}
    for route in routes:
        for rank, count in route.staged.items():
            totals[rank] = totals.get(rank, 0) + count
    return max(totals.values(), default=0)


def rounds_of(elements: int, limit: int, peers: int) -> int:
    """Return the number of rounds in which a rank sends and receives at most `limit` elements each.

    Every message is divided evenly, so a round may have one element more of each of the `2 * peers` messages.
    """
    usable = max(limit - 2 * peers, 1)
    return min(-(-elements // usable), max(elements, 1)) if elements > limit else 1
