"""The route of a tensor from one mesh to another, cached.

A submesh such as `mesh["tp"]` has parallel instances, each with a tensor of its own. If every target instance shares
ranks with exactly one source instance, these tensors stay separate: each source instance, with its target instances, is
one part of the mesh pair (parts must have the same number of ranks). Otherwise all ranks are one part, and the source
instances count as replicas of one tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from .._torch.device_mesh import listed
from ..sharding.layout import Layout
from ..sharding.mesh import MeshInfo
from ..sharding.runtime import WorldCache
from .boxes import Segment
from .routes import Holding, Route

RankSet = frozenset[int]


@dataclass(frozen=True, eq=False)
class MeshPair:
    """Two meshes of one world, and the ranks of each part. There is one object for each pair, compared by identity."""

    source: MeshInfo
    target: MeshInfo
    parts: tuple[tuple[RankSet, RankSet], ...]
    """For each part: its ranks in the source mesh, its ranks in the target mesh."""

    @cached_property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each part, in either mesh, ascending."""
        return tuple(tuple(sorted(have | need)) for have, need in self.parts)

    @property
    def outside(self) -> bool:
        """Whether this process is in neither mesh."""
        return self.source.outside and self.target.outside

    @property
    def merges(self) -> bool:
        """Whether source instances, which may hold different tensors, would have to be replicas of one tensor."""
        return self.source.instances.shape[0] > len(self.parts)

    @property
    def copies(self) -> bool:
        """Whether a tensor of the source is copied to several instances of the target."""
        return self.target.instances.shape[0] > len(self.parts)


_PAIRS: WorldCache[tuple[MeshInfo, MeshInfo], MeshPair] = WorldCache("pairs of meshes", 1 << 20)


def mesh_pair(source: MeshInfo, target: MeshInfo) -> MeshPair:
    """Return the pair of two meshes, from the world's cache."""
    cache = _PAIRS.of(source.runtime)
    found = cache.get((source, target))
    if found is None:
        found = cache[source, target] = MeshPair(source, target, _parts(source, target))
    return found


def _parts(source: MeshInfo, target: MeshInfo) -> tuple[tuple[RankSet, RankSet], ...]:
    everyone = (frozenset(source.ranks), frozenset(target.ranks))
    have = [frozenset(ranks) for ranks in listed(source.instances.flatten(1))]
    need = [frozenset(ranks) for ranks in listed(target.instances.flatten(1))]
    if len(have) == 1:
        return (everyone,)
    parts = [(ranks, frozenset[int]().union(*(other for other in need if other & ranks))) for ranks in have]
    shared_with = [sum(bool(ranks & other) for ranks in have) for other in need]
    apart = all(count == 1 for count in shared_with) and all(others for _, others in parts)
    # Simulated ranks run the parts in one collective, whose groups have one size.
    alike = len({len(ranks | others) for ranks, others in parts}) == 1
    return tuple(parts) if apart and alike else (everyone,)


# ---- routes ---------------------------------------------------------------------------------------------------------


class RouteKey(NamedTuple):
    """What a route depends on. Layouts are without Partial axes; `sending` and `needing` select ranks."""

    source: Layout
    target: Layout
    sending: tuple[tuple[int, int], ...] = ()
    """(axis, index): only ranks of the source mesh with this index on the axis send."""
    needing: tuple[int, ...] = ()
    """Only ranks of the target mesh with index 0 on these axes receive."""
    segment: Segment | None = None


_ROUTES: WorldCache[tuple[MeshPair, RouteKey], Route] = WorldCache("routes", 64 << 20, lambda key, route: route.nbytes)


def route_of(pair: MeshPair, key: RouteKey) -> Route:
    """Return the route of a tensor between two meshes, from the world's cache."""
    cache = _ROUTES.of(pair.source.runtime)
    found = cache.get((pair, key))
    if found is None:
        found = cache[pair, key] = _make_route(pair, key)
    return found


def _make_route(pair: MeshPair, key: RouteKey) -> Route:
    have = _holdings(pair.source, key.source, key.sending, tuple(ranks for ranks, _ in pair.parts))
    need = [(axis, 0) for axis in key.needing]
    needed = _holdings(pair.target, key.target, tuple(need), tuple(ranks for _, ranks in pair.parts))
    return Route(zip(have, needed, strict=True), key.segment)


_Where = tuple[tuple[int, int], ...]
_HOLDINGS: WorldCache[tuple[MeshInfo, Layout, _Where, tuple[RankSet, ...]], list[Holding]] = WorldCache(
    "holdings", 16 << 20, lambda key, found: 256 * (1 + len(key[0].ranks))
)


def _holdings(mesh_info: MeshInfo, layout: Layout, where: _Where, parts: tuple[RankSet, ...]) -> list[Holding]:
    """Return the holding of each part, of ranks with the given index on each axis in `where`."""
    cache, key = _HOLDINGS.of(mesh_info.runtime), (mesh_info, layout, where, parts)
    found = cache.get(key)
    if found is None:
        every = zip(mesh_info.ranks, mesh_info.coordinates, strict=True)
        places = [(rank, at) for rank, at in every if all(at[axis] == index for axis, index in where)]
        found = [Holding.of(layout, (place for place in places if place[0] in ranks)) for ranks in parts]
        cache[key] = found
    return found
