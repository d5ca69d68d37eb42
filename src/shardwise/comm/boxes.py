"""The boxes of an exchange: for each pair of ranks, which slices of a local tensor go where.

Between any two layouts of one tensor, a rank sends each peer the intersection of its own shard with the shard that the
peer needs. Along one dim that intersection is a list of runs; a box is one run for each dim. Pure arithmetic.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from ..sharding.layout import Coordinate, Layout, Run

Box = tuple[tuple[int, int, int], ...]
"""For each dim: offset in the sender's local tensor, offset in the receiver's, length."""


class Schedule(NamedTuple):
    """The boxes that one rank sends and receives, peer by peer in group order, and their numbers of elements."""

    send: tuple[tuple[Box, ...], ...]
    receive: tuple[tuple[Box, ...], ...]
    send_sizes: tuple[int, ...]
    receive_sizes: tuple[int, ...]


def schedule_bytes(schedule: Schedule) -> int:
    """About what a schedule takes in memory."""
    return 1024 + boxes_bytes(schedule.send) + boxes_bytes(schedule.receive)


def boxes_bytes(by_peer: Sequence[Sequence[Box]]) -> int:
    """About what boxes take in memory: a tuple for each peer, and a tuple of tuples for each box."""
    return 128 * len(by_peer) + sum(64 + 160 * len(box) for boxes in by_peer for box in boxes)


def schedule(before: Layout, after: Layout, coordinate: Coordinate, axes: Sequence[int]) -> Schedule:
    """The schedule of the rank at this coordinate, exchanging with the ranks over these axes.

    In an exchange exactly one peer holds each element that a rank needs: the axes are those that shard the tensor
    before it. In a reduction over these axes every peer holds an operand of the same elements, and sends what the
    receiver needs.
    """
    peers = members(before.mesh_sizes, coordinate, axes)
    mine_before, mine_after = before.runs(coordinate), after.runs(coordinate)
    send = tuple(intersection(mine_before, after.runs(peer)) for peer in peers)
    receive = tuple(intersection(before.runs(peer), mine_after) for peer in peers)
    return Schedule(send, receive, tuple(map(volume, send)), tuple(map(volume, receive)))


def members(mesh_sizes: tuple[int, ...], coordinate: Coordinate, axes: Sequence[int]) -> list[Coordinate]:
    """The coordinates that differ from this one only on these axes, in group order."""
    result = []
    for indices in itertools.product(*(range(mesh_sizes[axis]) for axis in axes)):
        peer = list(coordinate)
        for axis, index in zip(axes, indices, strict=True):
            peer[axis] = index
        result.append(tuple(peer))
    return result


def intersection(have: Sequence[tuple[Run, ...]], need: Sequence[tuple[Run, ...]]) -> tuple[Box, ...]:
    """The boxes in both shards, given the runs of every dim on each side."""
    by_dim = [_common_runs(one, other) for one, other in zip(have, need, strict=True)]
    return tuple(itertools.product(*by_dim)) if all(by_dim) else ()


@lru_cache(maxsize=65536)
def _common_runs(have: tuple[Run, ...], need: tuple[Run, ...]) -> list[tuple[int, int, int]]:
    result = []
    i = j = have_offset = need_offset = 0
    while i < len(have) and j < len(need):
        (have_start, have_stop), (need_start, need_stop) = have[i], need[j]
        start, stop = max(have_start, need_start), min(have_stop, need_stop)
        if start < stop:
            result.append((have_offset + start - have_start, need_offset + start - need_start, stop - start))
        if have_stop <= need_stop:
            have_offset += have_stop - have_start
            i += 1
        else:
            need_offset += need_stop - need_start
            j += 1
    return result


def volume(boxes: Sequence[Box]) -> int:
    """The number of elements in some boxes."""
    return sum(math.prod(length for _, _, length in box) for box in boxes)
