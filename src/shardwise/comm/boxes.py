"""The boxes of an exchange: for each pair of ranks, which slices of a local tensor go where.

Between any two layouts of one tensor, a rank sends each peer the intersection of its own shard with the shard that the
peer needs. Along one dim that intersection is a list of runs; a box is one run for each dim. Pure arithmetic.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..sharding.cache import cached_within
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
    """Return about how many bytes a schedule takes in memory."""
    return 1024 + boxes_bytes(schedule.send) + boxes_bytes(schedule.receive)


def boxes_bytes(by_peer: Sequence[Sequence[Box]]) -> int:
    """Return about how many bytes boxes take in memory: a tuple for each peer, and one of tuples for each box."""
    return 128 * len(by_peer) + sum(64 + 160 * len(box) for boxes in by_peer for box in boxes)


def schedule(before: Layout, after: Layout, coordinate: Coordinate, axes: Sequence[int]) -> Schedule:
    """Return the schedule of the rank at this coordinate, exchanging with the ranks that differ only on these axes.

    In an exchange exactly one peer holds each element that a rank needs, since the axes are those that shard the
    source. In a reduction over these axes every peer holds an operand of the same elements, and sends what the
    receiver needs.
    """
    peers = members(before.mesh_sizes, coordinate, axes)
    mine_before, mine_after = before.runs(coordinate), after.runs(coordinate)
    send = tuple(intersection(mine_before, after.runs(peer)) for peer in peers)
    receive = tuple(intersection(before.runs(peer), mine_after) for peer in peers)
    return Schedule(send, receive, tuple(map(volume, send)), tuple(map(volume, receive)))


def members(mesh_sizes: tuple[int, ...], coordinate: Coordinate, axes: Sequence[int]) -> list[Coordinate]:
    """Return the coordinates that differ from this one only on these axes, in group order. This one is among them."""
    result = []
    for indices in itertools.product(*(range(mesh_sizes[axis]) for axis in axes)):
        peer = list(coordinate)
        for axis, index in zip(axes, indices, strict=True):
            peer[axis] = index
        result.append(tuple(peer))
    return result


class Segment(NamedTuple):
    """Which indices of two different tensors are the same elements, e.g. of `q` and of a fused `[q; k; v]`.

    Along `dim`, `[start, start + length)` of the source is `[target_start, target_start + length)` of the target.
    """

    dim: int
    start: int
    target_start: int
    length: int


def intersection(
    have: Sequence[tuple[Run, ...]], need: Sequence[tuple[Run, ...]], segment: Segment | None = None
) -> tuple[Box, ...]:
    """Return the boxes of the elements that two shards have in common, given the runs of each dim on both sides.

    With a `segment`, the shards belong to two tensors, which have only that segment in common.
    """
    by_dim = [common_runs(dim, one, other, segment) for dim, (one, other) in enumerate(zip(have, need, strict=True))]
    return tuple(itertools.product(*by_dim)) if all(by_dim) else ()


def common_runs(
    dim: int, have: tuple[Run, ...], need: tuple[Run, ...], segment: Segment | None = None
) -> Sequence[tuple[int, int, int]]:
    """Return the intersection of two shards along one dim as `(offset in have, offset in need, length)`."""
    if segment is None or segment.dim != dim:
        return _common_runs(have, need, None)
    return _common_runs(have, need, segment[1:])


Placed = list[tuple[int, int, int]]
"""Runs as `(start, stop, offset in the local shard)`."""


@cached_within(16 << 20, lambda runs: 150 * len(runs))
def _common_runs(
    have: tuple[Run, ...], need: tuple[Run, ...], segment: tuple[int, int, int] | None
) -> Sequence[tuple[int, int, int]]:
    start, target_start, length = segment or (0, 0, math.inf)
    sent = _placed(have, start, start + length, 0)
    received = _placed(need, target_start, target_start + length, start - target_start)
    result = []
    i = j = 0
    while i < len(sent) and j < len(received):
        (have_start, have_stop, have_offset), (need_start, need_stop, need_offset) = sent[i], received[j]
        low, high = max(have_start, need_start), min(have_stop, need_stop)
        if low < high:
            result.append((have_offset + low - have_start, need_offset + low - need_start, high - low))
        if have_stop <= need_stop:
            i += 1
        else:
            j += 1
    return tuple(result)


def _placed(runs: tuple[Run, ...], low: float, high: float, shift: int) -> Placed:
    """Return what the runs have in `[low, high)`, with indices shifted by `shift`."""
    result, offset = [], 0
    for start, stop in runs:
        first, last = max(start, int(low)), stop if stop <= high else int(high)
        if first < last:
            result.append((first + shift, last + shift, offset + first - start))
        offset += stop - start
    return result


def cut_boxes(boxes: Sequence[Box], low: int, high: int) -> Iterator[Box]:
    """Yield the boxes of the elements `[low, high)`, counted box after box, and in row-major order within each.

    >>> list(cut_boxes([((0, 0, 2), (0, 0, 4))], 3, 6))     # the end of row 0, and the beginning of row 1
    [((0, 0, 1), (3, 3, 1)), ((1, 1, 1), (0, 0, 2))]
    """
    start = 0
    for box in boxes:
        size = math.prod(length for _, _, length in box)
        first, last = max(low - start, 0), min(high - start, size)
        if first < last:
            yield from _cut_box(box, first, last)
        start += size


def _cut_box(box: Box, low: int, high: int) -> Iterator[Box]:
    rows = box[0][2] if box else 1
    row = math.prod(length for _, _, length in box[1:])
    if (low, high) == (0, rows * row):
        yield box
        return
    first, last = -(-low // row), high // row  # the complete rows
    if first > last:
        yield from _in_row(box, last, low - last * row, high - last * row)
        return
    if low < first * row:
        yield from _in_row(box, first - 1, low - (first - 1) * row, row)
    if first < last:
        yield (_rows(box[0], first, last - first), *box[1:])
    if last * row < high:
        yield from _in_row(box, last, 0, high - last * row)


def _in_row(box: Box, index: int, low: int, high: int) -> Iterator[Box]:
    for rest in _cut_box(box[1:], low, high):
        yield (_rows(box[0], index, 1), *rest)


def _rows(run: tuple[int, int, int], first: int, count: int) -> tuple[int, int, int]:
    return run[0] + first, run[1] + first, count


def volume(boxes: Sequence[Box]) -> int:
    """Return the number of elements in these boxes."""
    return sum(math.prod(length for _, _, length in box) for box in boxes)
