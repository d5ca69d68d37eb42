"""What communication costs: a latency for each collective and each peer, and seconds per byte on each axis.

There are two prices. Native collectives (all-gather, reduce-scatter, all-reduce) pass data from rank to rank in a ring;
all-to-alls and exchanges send point to point, from each rank to each other one, which is slower where ranks share the
network cards of a node.

The planner compares plans by these figures. They need not be exact: what matters is how a collective's latency
compares with the time of its bytes, which axes are slower than others, and how much slower point-to-point traffic is.

>>> set_cost_model(CostModel(bandwidth={"dp": 25e9, "tp": 300e9}))     # dp crosses nodes, tp does not
>>> set_cost_model(CostModel(p2p_bandwidth={"dp": 2e9}))               # and all-to-alls over dp are slow
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from ..sharding.mesh import MeshInfo
from ..sharding.runtime import WorldCache, clear_all_caches

LOCAL_STEP = 1e-6
"""Seconds of a step without communication: of two plans that cost the same, the one with fewer such steps wins."""


class Rates(NamedTuple):
    """What native or point-to-point traffic costs: latencies by axis, a latency for each peer, bytes/s by axis."""

    latency: tuple[float, ...]
    peer_latency: float
    bandwidth: tuple[float, ...]

    def seconds(self, axes: tuple[int, ...], peers: int, received: float) -> float:
        """Return the time of one collective over these axes in which a rank receives this many bytes."""
        if len(axes) == 1:
            axis = axes[0]
            return self.latency[axis] + self.peer_latency * peers + received / self.bandwidth[axis]
        slowest = min(map(self.bandwidth.__getitem__, axes))
        return max(map(self.latency.__getitem__, axes)) + self.peer_latency * peers + received / slowest

    def at_most(self, other: Rates) -> bool:
        """Return whether no message costs more than at the other rates."""
        return (
            self.peer_latency <= other.peer_latency
            and all(map(operator.le, self.latency, other.latency))
            and all(map(operator.ge, self.bandwidth, other.bandwidth))
        )


@dataclass(frozen=True)
class Links:
    """The costs of one mesh, as numbers: the planner needs no mesh, and its cache can key on them.

    `ring` is what native collectives cost, `p2p` what all-to-alls and exchanges cost, `pack` the seconds per byte of
    copying data on its way.
    """

    ring: Rates
    p2p: Rates
    pack: float

    @classmethod
    def uniform(cls, latency: float, peer_latency: float, pack: float, bandwidth: tuple[float, ...]) -> Links:
        """Return links whose axes have one latency, and on which all traffic has the price of native collectives."""
        rates = Rates((latency,) * len(bandwidth), peer_latency, bandwidth)
        return cls(rates, rates, pack)

    @property
    def bandwidth(self) -> tuple[float, ...]:
        """Bytes per second of native collectives, by axis."""
        return self.ring.bandwidth

    def seconds(self, axes: tuple[int, ...], peers: int, received: float) -> float:
        """Return the time of one native collective over these axes in which a rank receives this many bytes."""
        return self.ring.seconds(axes, peers, received)

    @cached_property
    def _hash(self) -> int:
        return hash((self.ring, self.p2p, self.pack))

    def __hash__(self) -> int:
        return self._hash  # computed once: caches of plans and estimates hash it at every look-up


class _Group(NamedTuple):
    """A group that belongs to no mesh, with the attributes of a `MeshInfo` of one axis that `CostModel.links` reads."""

    device_type: str
    ranks: Sequence[int]
    world_size: int
    names: tuple[str, ...] = ("",)

    def rank_groups(self, axes: tuple[int, ...]) -> list[list[int]]:
        """Return the group's ranks, as the only group along its axis."""
        return [list(self.ranks)]


@dataclass(frozen=True)
class CostModel:
    """What communication costs, in seconds and bytes per second. None means the default of the mesh's device type.

    `bandwidth` maps axis names to bytes per second of native collectives. An axis that is not named gets
    `node_bandwidth` if its ranks are on one node (of `node_size` ranks, by default torchrun's LOCAL_WORLD_SIZE), else
    `network_bandwidth`. `latency` is one number, or maps axis names to numbers.

    `p2p_bandwidth`, `p2p_latency` and `p2p_peer_latency` are the same for all-to-alls and exchanges. An axis that is
    not named has the latency and bandwidth of native collectives, or, if it crosses nodes, that bandwidth times
    `network_p2p`. Uneven shards are gathered and reduced by a native collective on padded shards, or by an exchange
    of exact pieces, whichever costs less.

    A tensor that changes its mesh is exchanged at once, or in rounds in which a rank needs at most `staging` bytes for
    what it sends and receives.

    >>> CostModel(network_p2p=0.1)                # all-to-alls between nodes reach a tenth of the bandwidth
    >>> CostModel(p2p_bandwidth={"tp": 400e9})    # over tp, exchanges are as good as anything
    """

    latency: float | Mapping[str, float] | None = None
    peer_latency: float | None = None
    pack: float | None = None
    node_bandwidth: float | None = None
    network_bandwidth: float | None = None
    node_size: int | None = None
    bandwidth: Mapping[str, float] = field(default_factory=dict)
    p2p_latency: float | Mapping[str, float] | None = None
    p2p_peer_latency: float | None = None
    p2p_bandwidth: Mapping[str, float] = field(default_factory=dict)
    network_p2p: float | None = None
    staging: int = 256 << 20

    def links_of_group(self, ranks: Sequence[int], world_size: int, device_type: str) -> Links:
        """Return the costs within a group that belongs to no mesh. Its only axis has index 0."""
        return self.links(_Group(device_type, ranks, world_size))

    def rates_between(self, source: MeshInfo, target: MeshInfo) -> Rates:
        """Return the rates of an exchange between two meshes: those of the slowest of their axes."""
        ranks = sorted({*source.ranks, *target.ranks})
        group = self.links_of_group(ranks, source.world_size, source.device_type)
        rates = [links.p2p for links in (group, self.links(source), self.links(target))]
        latency, bandwidth = max(max(each.latency) for each in rates), min(min(each.bandwidth) for each in rates)
        return Rates((latency,), group.p2p.peer_latency, (bandwidth,))

    def links(self, mesh_info: MeshInfo | _Group) -> Links:
        """Return the costs on one mesh, axis by axis."""
        default = _CPU if mesh_info.device_type == "cpu" else _ACCELERATOR
        names = mesh_info.names
        node = self.node_bandwidth or default.node_bandwidth
        network = self.network_bandwidth or default.network_bandwidth
        share = self.network_p2p or default.network_p2p
        crosses = self._crossing_nodes(mesh_info)
        bandwidth = tuple(
            self.bandwidth.get(name, network if far else node) for name, far in zip(names, crosses, strict=True)
        )
        slower = (rate * share if far else rate for rate, far in zip(bandwidth, crosses, strict=True))
        p2p_bandwidth = tuple(self.p2p_bandwidth.get(name, rate) for name, rate in zip(names, slower, strict=True))
        latency = _by_axis(self.latency, names, (default.latency,) * len(names))
        peer_latency = default.peer_latency if self.peer_latency is None else self.peer_latency
        p2p_peer_latency = peer_latency if self.p2p_peer_latency is None else self.p2p_peer_latency
        return Links(
            Rates(latency, peer_latency, bandwidth),
            Rates(_by_axis(self.p2p_latency, names, latency), p2p_peer_latency, p2p_bandwidth),
            default.pack if self.pack is None else self.pack,
        )

    def _crossing_nodes(self, mesh_info: MeshInfo | _Group) -> list[bool]:
        """Return for each axis whether one of its groups has ranks of several nodes."""
        size = self.node_size or int(os.environ.get("LOCAL_WORLD_SIZE", mesh_info.world_size))
        axes = range(len(mesh_info.names))
        return [any(len({rank // size for rank in group}) > 1 for group in mesh_info.rank_groups((a,))) for a in axes]


def _by_axis(
    given: float | Mapping[str, float] | None, names: tuple[str, ...], default: tuple[float, ...]
) -> tuple[float, ...]:
    """Return one number for each axis: the given one for all axes, or those given by name, or the defaults."""
    if given is None:
        return default
    if isinstance(given, Mapping):
        return tuple(given.get(name, usual) for name, usual in zip(names, default, strict=True))
    return (given,) * len(names)


class _Defaults(NamedTuple):
    latency: float
    peer_latency: float
    pack: float
    node_bandwidth: float
    network_bandwidth: float
    network_p2p: float


# Orders of magnitude: NVLink and InfiniBand with NCCL; shared memory and Ethernet with gloo. In a ring of the ranks of
# several nodes one message in eight leaves a node of eight; in an all-to-all of two nodes every second one does.
_ACCELERATOR = _Defaults(20e-6, 0.5e-6, 1e-12, 200e9, 25e9, 0.25)
_CPU = _Defaults(500e-6, 20e-6, 1e-10, 2e9, 1e9, 0.5)

_model = CostModel()


def cost_model() -> CostModel:
    """Return the cost model in use.

    >>> cost_model().bandwidth is None                      # None: the defaults for the device type of a mesh
    False
    """
    return _model


def set_cost_model(model: CostModel) -> None:
    """Use this model for all plans from now on, and clear all caches. All ranks must set the same model.

    >>> set_cost_model(CostModel(bandwidth={"dp": 25e9, "tp": 300e9}))
    """
    global _model
    _model = model
    clear_all_caches()


@contextmanager
def using_cost_model(model: CostModel) -> Iterator[None]:
    """Plan with this model inside the block.

    >>> x = zeros(8, 4, device_mesh=mesh, placements=P("dp"))
    >>> with using_cost_model(CostModel(bandwidth={"dp": 1e6})):
    ...     seconds = plan(x, P()).plan.seconds
    """
    before = _model
    set_cost_model(model)
    try:
        yield
    finally:
        set_cost_model(before)


_LINKS: WorldCache[MeshInfo, Links] = WorldCache("links of a mesh", 1 << 18)


def links_of(mesh_info: MeshInfo) -> Links:
    """Return what communication costs on a mesh, by the cost model in use."""
    cache = _LINKS.of(mesh_info.runtime)
    found = cache.get(mesh_info)
    if found is None:
        found = cache[mesh_info] = _model.links(mesh_info)
    return found
