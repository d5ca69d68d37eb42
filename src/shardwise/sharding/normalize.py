"""Check placements as users write them, and normalize them."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import InputError, PlacementError
from .from_placements import default_order
from .mesh import MeshInfo
from .placement import (
    AnyShard,
    InterleavedShard,
    OrderedShard,
    P,
    Partial,
    Placement,
    Placements,
    Replicate,
    Shard,
    ShardOrder,
    ShardOrderEntry,
    as_placement,
)


def normalize_placements(
    mesh_info: MeshInfo, placements: Placements | None, ndim: int, order: ShardOrder | None = None
) -> tuple[tuple[Placement, ...], ShardOrder]:
    """Return one checked placement for each mesh axis, with dims >= 0, and the shard order. None means replicated.

    >>> normalize_placements(mesh_info, [Shard(-1), Replicate()], ndim=2)
    ((Shard(dim=1), Replicate()), (ShardOrderEntry(tensor_dim=1, mesh_dims=(0,)),))
    """
    if placements is None:
        return (Replicate(),) * len(mesh_info.sizes), ()
    if isinstance(placements, P):
        return placements.resolve(mesh_info.names, ndim)
    if isinstance(placements, (Placement, str)) or not isinstance(placements, Sequence):
        raise InputError(
            f"placements is {placements!r}", "pass a list with one placement for each mesh axis, or P(...)"
        )
    if len(placements) != len(mesh_info.sizes):
        raise PlacementError(
            f"{_count(len(placements), 'placement')} {list(placements)} for {mesh_info!r}, "
            f"which has {_count(len(mesh_info.sizes), 'axis', 'axes')}",
            "give one placement for each axis",
        )
    if any(isinstance(placement, OrderedShard) for placement in placements):
        order = _given_order(placements, ndim)
    normal = tuple(_normalize(placement, mesh_info.names[axis], ndim) for axis, placement in enumerate(placements))
    return normal, _normalize_order(normal, ndim, order)


def _given_order(placements: Sequence[Placement], ndim: int) -> ShardOrder:
    """Return the shard order that `OrderedShard`s give, and the default one for other dims."""
    by_dim: dict[int, list[tuple[int, int]]] = {}
    for axis, placement in enumerate(placements):
        if isinstance(placement, AnyShard):
            place = placement.place if isinstance(placement, OrderedShard) else -1
            by_dim.setdefault(placement.dim % max(ndim, 1), []).append((place, axis))
    for dim, entries in by_dim.items():
        places = sorted(place for place, _ in entries)
        if places not in (list(range(len(places))), [-1] * len(places)):
            raise PlacementError(
                f"the axes that shard dim {dim} have the places {places} (-1: none) in {list(placements)}",
                f"number all axes of a dim: {list(range(len(places)))}, or none of them",
            )
    return tuple(ShardOrderEntry(dim, tuple(axis for _, axis in sorted(by_dim[dim]))) for dim in sorted(by_dim))


def _normalize_order(placements: tuple[Placement, ...], ndim: int, order: ShardOrder | None) -> ShardOrder:
    default = default_order(placements)
    if order is None:
        return default
    given = {dim % max(ndim, 1): tuple(axes) for dim, axes in order if axes}
    if {dim: sorted(axes) for dim, axes in given.items()} != {dim: list(axes) for dim, axes in default}:
        raise PlacementError(
            f"the shard order {tuple(order)} does not list the axes that {list(placements)} shard over",
            f"list the same axes, in any order: {default}",
        )
    return tuple(type(entry)(entry.tensor_dim, given[entry.tensor_dim]) for entry in default)


def _normalize(given: object, axis_name: str, ndim: int) -> Placement:
    placement = as_placement(given)
    if isinstance(placement, (Replicate, Partial)):
        return placement
    if not isinstance(placement, AnyShard):
        kind = type(given)
        raise InputError(
            f"the placement of axis {axis_name} is {given!r}, a {kind.__module__}.{kind.__name__}",
            "use Shard, Replicate or Partial",
        )
    if not -ndim <= placement.dim < ndim:
        fix = f"use a dim in [{-ndim}, {ndim - 1}]" if ndim else "a 0-dim tensor can be replicated or partial only"
        raise PlacementError(f"{placement!r} on axis {axis_name}, for a tensor of {ndim} dims", fix)
    dim = placement.dim % ndim
    if isinstance(placement, InterleavedShard) and placement.blocks > 1:
        return InterleavedShard(dim, placement.blocks)
    return Shard(dim)


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
