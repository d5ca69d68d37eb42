"""Grouped products whose rows and groups are sharded over one axis: rows travel to the ranks of their groups, and back.

An axis shards one factor of an op. Where tokens and experts are sharded over the same axis, the rule of `grouped_mm`
therefore gathers one of them. Here neither is gathered: each rank sends its rows to the ranks that hold their groups,
multiplies what arrives, and sends the results back, in the layout of the rows. Every rank knows where groups end, so no
counts are sent; the split sizes are read on the host once for all products with the same ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .._torch.fake_tensors import is_fake
from ..comm.on_ranks import on_ranks
from ..comm.redistribute import redistribute_local
from ..comm.token_route import ExpertAxis, TokenRoute, route_known_rows
from ..sharding.base import DTensorBase
from ..sharding.layout import Coordinate, Dim, Factor, Layout, Run, dim_axes
from ..sharding.memory_order import contiguous_meta
from ..sharding.recording import is_recording
from ..sharding.spec import DTensorSpec
from ..world import RankTensor, map_ranks, shards_of
from .grouped_local import grouped_mm, grouped_outer, local_ends
from .replicated import gathered


class Exchange(NamedTuple):
    """How rows and matrices of a product are sharded. Rows travel along `axis`, the one that shards the groups."""

    axis: ExpertAxis
    rows: Layout
    matrices: Layout

    def dims(self) -> tuple[Dim, Dim, Dim, Dim]:
        """Return the dims, with their shardings, of the rows, the groups, the summed features and the result's."""
        return self.rows.dims[0], *self.matrices.dims  # type: ignore[return-value]

    def wrapped(self, local: Tensor, *dims: Dim, summed: tuple[int, ...] = ()) -> DTensorBase:
        """Wrap a local shard as a distributed tensor with these dims, which is a partial sum over the axes `summed`."""
        mesh_info = self.axis.mesh_info
        layout = Layout.make(mesh_info.sizes, dims, tuple((axis, "sum") for axis in summed))
        meta = contiguous_meta(layout.shape, local.dtype)
        return DTensorBase.concrete.wrap(local, DTensorSpec.from_layout(mesh_info, layout, meta))


def exchange_of(rows: Tensor, matrices: Tensor, ends: Tensor) -> Exchange | None:
    """Return how to exchange the rows of a product; None if the op's rule serves it."""
    if not (isinstance(rows, DTensorBase) and isinstance(matrices, DTensorBase) and isinstance(ends, DTensorBase)):
        return None
    mesh_info, groups = rows._spec.mesh_info, matrices._spec.layout
    if len(groups.dims[0]) != 1 or len(groups.dims[0][0].axes) != 1 or groups.partial:
        return None
    (index,) = groups.dims[0][0].axes
    given = _without_sum(rows._spec.layout, index)
    over_rows, over_features = dim_axes(given.dims[0]), dim_axes(groups.dims[2])
    if given.partial or index not in over_rows or given.dims[1] != groups.dims[1]:
        return None
    if not (mesh_info is matrices._spec.mesh_info is ends._spec.mesh_info) or mesh_info.outside:
        return None
    axis = ExpertAxis(mesh_info, index, matrices.shape[0])
    # A rank sends its share of the rows and gets its share of the results; the rule may gather the matrices instead.
    moved = rows.shape[0] * (rows.shape[1] + matrices.shape[2]) / axis.ranks
    if moved > matrices.numel() or set(over_features) & set(over_rows) or axis.ranks == 1:
        return None
    if rows.is_meta or is_fake(rows) or is_recording():
        return None
    return Exchange(axis, given, groups)


def _without_sum(rows: Layout, axis: int) -> Layout:
    """Return the layout with rows that are a sum over this axis sharded over it, at half the cost of an all-reduce."""
    if rows.partial != ((axis, "sum"),) or len(rows.dims[0]) != 1:
        return rows
    size, axes = rows.dims[0][0]
    return Layout.make(rows.mesh_sizes, ((Factor(size, (*axes, axis)),), *rows.dims[1:]))


def exchanged_product(
    exchange: Exchange, rows: DTensorBase, matrices: DTensorBase, ends: DTensorBase
) -> tuple[DTensorBase, Tensor]:
    """Return the product of each group's rows with its matrix, in the layout of the rows, and the rows that arrived."""
    over_rows, _, summed, features = exchange.dims()
    route = _route(exchange, ends)
    local = redistribute_local(rows._local_shard, rows._spec, rows._spec.with_layout(exchange.rows))
    arrived = _sent(local, route)
    product = _on_ranks(grouped_mm, exchange.axis, arrived, matrices._local_shard, route.counts)
    result = _returned(product, route, local)
    return exchange.wrapped(result, over_rows, features, summed=dim_axes(summed)), arrived


def exchanged_gradients(
    exchange: Exchange,
    gradient: DTensorBase,
    saved: tuple[Tensor, DTensorBase, DTensorBase],
    needed: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of rows and matrices, where needed. The rows are not sent again.

    `saved` are the rows that arrived, the matrices and the ends.
    """
    arrived, matrices, ends = saved
    over_rows, groups, summed, features = exchange.dims()
    axis, route = exchange.axis, _route(exchange, ends)
    target = gradient._spec.with_layout(Layout.make(axis.mesh_info.sizes, (over_rows, features)))
    local = redistribute_local(gradient._local_shard, gradient._spec, target)
    sent = _sent(local, route)
    of_rows = of_matrices = None
    if needed[0]:
        product = _on_ranks(grouped_mm, axis, sent, matrices._local_shard.transpose(1, 2), route.counts)
        of_rows = exchange.wrapped(_returned(product, route, local), over_rows, summed, summed=dim_axes(features))
    if needed[1]:
        product = _on_ranks(grouped_outer, axis, arrived.t(), sent, route.counts)
        others = tuple(other for other in dim_axes(over_rows) if other != axis.index)
        of_matrices = exchange.wrapped(product, groups, summed, features, summed=others)
    return of_rows, of_matrices


def _sent(rows: Tensor, route: TokenRoute) -> Tensor:
    """Send rows to the ranks of their groups, and return those that arrive; rows after the last group are not sent."""
    assert route.sent is not None
    return route.send(rows[: sum(route.sent)])


def _returned(results: Tensor, route: TokenRoute, like: Tensor) -> Tensor:
    """Send results back, and return those of this rank's rows; rows after the last group get zeros."""
    assert route.sent is not None
    return pad(route.back(results), (0, 0, 0, like.shape[0] - sum(route.sent)))


def _on_ranks(op: Callable[..., Tensor], axis: ExpertAxis, left: Tensor, right: Tensor, counts: Tensor) -> Tensor:
    """Return a grouped product of local tensors, rank by rank: ranks may hold different numbers of groups."""

    def run(at: Coordinate, left: Tensor, right: Tensor, counts: Tensor) -> Tensor:
        return op(left, right, counts[: axis.held(at[axis.index])].cumsum(0))

    mesh_info = axis.mesh_info
    if isinstance(left, RankTensor):
        return map_ranks(lambda rank, *given: run(mesh_info.coordinates[rank], *given), left, right, counts)
    return run(mesh_info.coordinate, left, right, counts)


# ---- routes ---------------------------------------------------------------------------------------------------------

_ROUTES = "_routes_of_rows"
"""The attribute of a distributed tensor of ends that holds the routes made from it, and the versions it had then.

Products of a layer share one route. After a write of the ends, their routes are made again, and the old ones dropped.
"""


def _route(exchange: Exchange, ends: DTensorBase) -> TokenRoute:
    """Return the route of the rows to their groups."""
    axis, layout = exchange.axis, exchange.rows
    local = gathered(ends)
    shards = shards_of(local)
    if any(tensor.is_inference() for tensor in (ends, *shards)):  # no version says whether they were written
        return _made(local.long(), layout, axis)
    versions = (ends._version, *(shard._version for shard in shards))
    known: tuple[object, dict[object, TokenRoute]] | None = ends.__dict__.get(_ROUTES)
    if known is None or known[0] != versions:
        known = ends.__dict__[_ROUTES] = versions, {}
    routes, key = known[1], (layout.dims[0], axis.index, axis.experts)
    if key not in routes:
        routes[key] = _made(local.long(), layout, axis)
    return routes[key]


def _made(ends: Tensor, layout: Layout, axis: ExpertAxis) -> TokenRoute:
    bounds, index = axis.bounds, axis.index

    def starts_at(at: Coordinate, ends: Tensor) -> Tensor:
        return _starts(ends, layout.runs(at)[0])

    def table_at(at: Coordinate, ends: Tensor) -> Tensor:
        own = slice(bounds[at[index]], bounds[at[index] + 1])
        sources = [(*at[:index], peer, *at[index + 1 :]) for peer in range(axis.ranks)]
        return torch.stack([_starts(ends, layout.runs(source)[0]).diff()[own] for source in sources])

    starts, table = on_ranks(axis.mesh_info, starts_at)(ends), on_ranks(axis.mesh_info, table_at)(ends)
    return route_known_rows(starts, table, axis)


def _starts(ends: Tensor, held: tuple[Run, ...]) -> Tensor:
    """Return where groups begin, and where the last one ends, among the rows that a rank holds."""
    return pad(local_ends(ends, held), (1, 0))
