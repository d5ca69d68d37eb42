"""Routes of token rows to the ranks that hold their experts: which row goes where, in which order, and back.

A rank has rows, each with the number of an expert. Experts are sharded over a mesh axis. `route_rows` sorts the rows
by their experts, sends every rank the number of rows it will get (one small all-to-all), and reads the split sizes (one
host read). `TokenRoute.send` then moves rows to their experts, and `TokenRoute.back` moves results to where the rows
came from: one all-to-all each, of exactly the rows that are routed.

    this rank's rows          a b c d e        experts 2 0 3 0 2; this rank holds 0 and 1
    sorted by expert          b d a e c        and split: b d stay here, a e c go to the other rank
    received, by source       b d | x y        the other rank sends x for expert 0 and y for expert 1
    `send` returns            b d x y          by expert, and within an expert by source: counts are [3, 1]

`own_rows` is the route for rows that are replicated over the axis: a rank takes those of its own experts, and nothing
is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from .._torch.collectives import all_to_all, wait
from .._torch.tools import shown_in_profile
from ..errors import InputError
from ..sharding.layout import Coordinate, chunk_range
from ..sharding.mesh import MeshInfo
from ..world import RankTensor, map_ranks, rank_int, values_of
from .on_ranks import joined_sizes, on_ranks, split_sizes
from .transport import moves_natively

Size = int
"""A number of rows. In a simulated world it may be a `SymInt` with a value for each rank, which ops take as well."""


@dataclass(frozen=True)
class ExpertAxis:
    """A mesh axis and the number of experts that are sharded over it, as `torch.chunk` does."""

    mesh_info: MeshInfo
    index: int
    experts: int

    @property
    def ranks(self) -> int:
        """The number of ranks along the axis."""
        return self.mesh_info.sizes[self.index]

    @property
    def bounds(self) -> list[int]:
        """The first expert of each rank, and at the end the number of experts."""
        return [chunk_range(0, self.experts, self.ranks, rank)[0] for rank in range(self.ranks)] + [self.experts]

    def held(self, rank: int) -> int:
        """Return how many experts the rank at this index of the axis holds."""
        return self.bounds[rank + 1] - self.bounds[rank]

    @property
    def most(self) -> int:
        """The largest number of experts that a rank holds."""
        return self.held(0)

    @property
    def is_even(self) -> bool:
        """Whether all ranks hold the same number of experts."""
        return self.experts % self.ranks == 0

    @property
    def own(self) -> Size:
        """The number of experts that this rank holds."""
        if not self.mesh_info.simulated:
            return self.held(self.mesh_info.coordinate[self.index])
        return cast(int, rank_int([self.held(at[self.index]) for at in self.mesh_info.coordinates]))

    def all_to_all(self, rows: Tensor, received: list[Size], sent: list[Size]) -> Tensor:
        """Return the rows that this rank receives in one all-to-all along the axis."""
        name = self.mesh_info.groups[(self.index,)]
        with shown_in_profile("shardwise::rows to experts over {}", self.mesh_info.names[self.index]):
            if moves_natively(rows.dtype):
                return wait(all_to_all(rows.contiguous(), received, sent, name))
            return wait(all_to_all(rows.contiguous().view(torch.uint8), received, sent, name)).view(rows.dtype)


@dataclass(frozen=True)
class TokenRoute:
    """The route of a rank's rows to their experts and back. A field is None if its step is not needed.

    `order` sorts this rank's rows by expert, and `restore` undoes that. `by_expert` sorts received rows, which come by
    source, by expert, and `by_source` undoes that. `taken` are the indices of the rows for this rank's experts, where
    all ranks have the same `all_rows` rows.
    """

    axis: ExpertAxis
    counts: Tensor
    """The number of rows of each of this rank's experts, with zeros at the end if other ranks hold more experts."""
    rows: Size
    """The number of rows of all of this rank's experts."""
    order: Tensor | None = None
    restore: Tensor | None = None
    by_expert: Tensor | None = None
    by_source: Tensor | None = None
    sent: list[Size] | None = None
    received: list[Size] | None = None
    taken: Tensor | None = None
    all_rows: Size = 0
    sizes: list[Size] | None = None
    """`counts` on the host, if asked for."""

    def send(self, rows: Tensor, repeat: int = 1) -> Tensor:
        """Return the rows for this rank's experts, by expert. Each given row is sent `repeat` times."""
        index = self.taken if self.taken is not None else self.order
        if index is not None:
            rows = rows.index_select(0, index // repeat if repeat > 1 else index)
        elif repeat > 1:
            rows = rows.repeat_interleave(repeat, 0)
        if self.sent is None or self.received is None:
            return rows
        return _selected(self.axis.all_to_all(rows, self.received, self.sent), self.by_expert)

    def back(self, rows: Tensor) -> Tensor:
        """Return rows from the experts to where they came from: the inverse of `send` with `repeat=1`.

        If all ranks have the same rows, the rows that other ranks compute are zero.
        """
        if self.taken is not None:
            return rows.new_zeros((self.all_rows, rows.shape[1])).index_copy_(0, self.taken, rows)
        if self.sent is not None and self.received is not None:
            rows = self.axis.all_to_all(_selected(rows, self.by_source), self.sent, self.received)
        return _selected(rows, self.restore)


def route_rows(expert_of_row: Tensor, axis: ExpertAxis, *, read_counts: bool = False) -> TokenRoute:
    """Return the route of rows to the given experts, one for each row. Each rank of the axis has rows of its own.

    With `read_counts`, the host read includes the number of rows of each of this rank's experts (`TokenRoute.sizes`).
    """
    order, starts = _sorted_by_expert(expert_of_row, axis.experts)
    return _route(axis, starts, expert_of_row.shape[0], order, read_counts)


def route_sorted_rows(counts: Tensor, rows: Size, axis: ExpertAxis, *, read_counts: bool = False) -> TokenRoute:
    """Return the route of rows that are sorted by expert; `counts` are the number of rows of each expert."""
    ends = counts.long().cumsum(0)
    return _route(axis, torch.cat([ends.new_zeros(1), ends]), rows, None, read_counts)


def route_known_rows(starts: Tensor, table: Tensor, axis: ExpertAxis) -> TokenRoute:
    """Return the route of sorted rows if the counts of all ranks are known: `table[source, expert]`. None are sent.

    `starts` are the first row of each expert among this rank's rows, and at the end the number of rows.
    """
    return _route(axis, starts, None, None, False, table)


def own_rows(expert_of_row: Tensor, axis: ExpertAxis, *, read_counts: bool = False) -> TokenRoute:
    """Return the route of rows that are replicated over the axis: each rank takes those of its own experts."""
    order, starts = _sorted_by_expert(expert_of_row, axis.experts)
    bounds = axis.bounds

    def own(at: Coordinate, starts: Tensor) -> Tensor:
        rank = at[axis.index]
        return starts[bounds[rank] : bounds[rank + 1] + 1]

    held = on_ranks(axis.mesh_info, own)(starts)
    counts = _padded(held.diff(), axis)
    first, last, *sizes = read_sizes(torch.cat([held[:1], held[-1:], *([counts] if read_counts else [])]))
    taken = _by_rank(lambda order, start, stop: order[start:stop], order, first, last)
    return TokenRoute(
        axis, counts, last - first, taken=taken, all_rows=expert_of_row.shape[0], sizes=sizes if read_counts else None
    )


def _route(
    axis: ExpertAxis,
    starts: Tensor,
    rows: Size | None,
    order: Tensor | None,
    read_counts: bool,
    table: Tensor | None = None,
) -> TokenRoute:
    """Return the route of rows; in sorted order, `starts` are the first row of each expert, and the number of rows."""
    restore = None if order is None else _by_rank(_inverse, order)
    counts = starts.diff()
    if axis.ranks == 1 and rows is not None:
        return TokenRoute(axis, counts, rows, order, restore, sizes=read_sizes(counts) if read_counts else None)
    ranks = axis.ranks
    table = _table_of_counts(axis, counts) if table is None else table
    counts = _padded(table.sum(0), axis)
    read = read_sizes(torch.cat([_leaving(axis, starts), table.sum(1), *([counts] if read_counts else [])]))
    sent, received, sizes = read[:ranks], read[ranks : 2 * ranks], read[2 * ranks :]
    if rows is not None:
        _check_all_are_sent(sum(sent), rows, axis.experts)
    total = sum(received)
    by_expert = by_source = None
    if axis.most > 1:
        by_expert = _by_rank(_expert_order, table, total)
        by_source = _by_rank(_inverse, by_expert)
    return TokenRoute(
        axis, counts, total, order, restore, by_expert, by_source, sent, received, sizes=sizes if read_counts else None
    )


def _table_of_counts(axis: ExpertAxis, counts: Tensor) -> Tensor:
    """Return how many rows each rank sends to each of this rank's experts, by one all-to-all of counts."""
    peers = range(axis.ranks)
    received = split_sizes(axis.mesh_info, axis.ranks, lambda at: [axis.held(at[axis.index]) for _ in peers])
    return axis.all_to_all(counts, received, [axis.held(peer) for peer in peers]).view(axis.ranks, axis.own)


def _leaving(axis: ExpertAxis, starts: Tensor) -> Tensor:
    """Return how many rows go to each rank. Slices, not an index, which would have to be copied to the device."""
    first = starts[:: axis.most][: axis.ranks + 1]  # the first expert of each rank, up to the last one that has any
    return torch.cat([first, starts[-1:].expand(axis.ranks + 1 - first.shape[0])]).diff()


def _padded(counts: Tensor, axis: ExpertAxis) -> Tensor:
    """Return the counts of this rank's experts with zeros at the end, so that they are equally many on each rank."""
    return counts if axis.is_even else _by_rank(lambda own: pad(own, (0, axis.most - own.shape[0])), counts)


def read_sizes(sizes: Tensor) -> list[Size]:
    """Read a vector of sizes on the host. A route does this once."""
    if not isinstance(sizes, RankTensor):
        return cast(list[int], sizes.tolist())
    return joined_sizes([shard.tolist() for shard in sizes.shards])


# ---- orders ---------------------------------------------------------------------------------------------------------


def _sorted_by_expert(expert_of_row: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return the order that sorts rows by expert, and where each expert begins in it. Nothing is read on the host."""
    found, order = expert_of_row.long().sort(stable=True)
    return order, torch.searchsorted(found, torch.arange(experts + 1, device=found.device))


def _expert_order(table: Tensor, total: int) -> Tensor:
    """Return the order that sorts received rows, which come by source and then by expert, by expert and then source.

    `table[source, expert]` is a number of rows.
    """
    counts, by_source = table.t().reshape(-1), table.reshape(-1)
    starts = (by_source.cumsum(0) - by_source).view_as(table).t().reshape(-1)
    shift = starts - (counts.cumsum(0) - counts)
    return shift.repeat_interleave(counts, output_size=total) + torch.arange(total, device=table.device)


def _inverse(order: Tensor) -> Tensor:
    """Return the inverse of a permutation."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))


def _selected(rows: Tensor, index: Tensor | None) -> Tensor:
    return rows if index is None else rows.index_select(0, index)


def _by_rank(fn: Callable[..., Tensor], *values: object) -> Tensor:
    """Call `fn` for this rank, or for each simulated one with its own tensors and sizes."""
    if any(isinstance(value, RankTensor) for value in values):
        return map_ranks(lambda _, *own: fn(*own), *values)
    return fn(*values)


def _check_all_are_sent(sent: Size, rows: Size, experts: int) -> None:
    # Per-rank sizes are not compared by `!=`, which raises an error where ranks differ.
    a, b = values_of(sent) or (sent,), values_of(rows) or (rows,)
    ranks = max(len(a), len(b))
    if (a if len(a) == ranks else a * ranks) != (b if len(b) == ranks else b * ranks):
        raise InputError(
            f"only {sent} of {rows} routed rows have an expert: an expert index is not in [0, {experts - 1}], or the "
            "counts do not add up to the number of rows",
            "choose each expert by its index, e.g. with torch.topk(scores, k), or pass the number of rows of each",
        )
