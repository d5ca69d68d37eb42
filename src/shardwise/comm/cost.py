"""What communication costs: a latency for each collective and each peer, and seconds per byte on each axis.

The planner compares plans by these figures. They need not be exact: what matters is how a collective's latency
compares with the time of its bytes, and which axes are slower than others.

>>> set_cost_model(CostModel(bandwidth={"dp": 25e9, "tp": 300e9}))     # dp crosses nodes, tp does not
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from ..sharding.mesh import MeshInfo
from ..sharding.runtime import clear_all_caches

LOCAL_STEP = 1e-6
"""Seconds of a step without communication: of two plans that cost the same, the one with fewer such steps wins."""


@dataclass(frozen=True)
class Links:
    """The costs of one mesh, as numbers: the planner needs no mesh, and its cache can key on them."""

    latency: float
    peer_latency: float
    pack: float
    bandwidth: tuple[float, ...]

    def seconds(self, axes: tuple[int, ...], peers: int, received: float) -> float:
        """The time of one collective over these axes in which a rank receives this many bytes."""
        slowest = min(self.bandwidth[axis] for axis in axes)
        return self.latency + self.peer_latency * peers + received / slowest


@dataclass(frozen=True)
class CostModel:
    """What communication costs, in seconds and bytes per second. A None takes the default of the mesh's device type.

    `bandwidth` maps axis names to bytes per second. An axis that is not named gets `node_bandwidth` if its ranks
    are on one node (of `node_size` ranks, by default torchrun's LOCAL_WORLD_SIZE), else `network_bandwidth`.
    """

    latency: float | None = None
    peer_latency: float | None = None
    pack: float | None = None
    node_bandwidth: float | None = None
    network_bandwidth: float | None = None
    node_size: int | None = None
    bandwidth: Mapping[str, float] = field(default_factory=dict)

    def links(self, mesh_info: MeshInfo) -> Links:
        """These costs for the axes of one mesh."""
        default = _CPU if mesh_info.device_type == "cpu" else _ACCELERATOR
        node = self.node_bandwidth or default.node_bandwidth or 1.0
        network = self.network_bandwidth or default.network_bandwidth or 1.0
        node_size = self.node_size or int(os.environ.get("LOCAL_WORLD_SIZE", mesh_info.world_size))
        bandwidth = []
        for axis, name in enumerate(mesh_info.names):
            crosses = any(len({rank // node_size for rank in group}) > 1 for group in mesh_info.rank_groups((axis,)))
            bandwidth.append(self.bandwidth.get(name, network if crosses else node))
        return Links(
            self.latency if self.latency is not None else default.latency or 0.0,
            self.peer_latency if self.peer_latency is not None else default.peer_latency or 0.0,
            self.pack if self.pack is not None else default.pack or 0.0,
            tuple(bandwidth),
        )


# Orders of magnitude: NVLink and InfiniBand with NCCL; shared memory and Ethernet with gloo.
_ACCELERATOR = CostModel(20e-6, 0.5e-6, 1e-12, 200e9, 25e9)
_CPU = CostModel(500e-6, 20e-6, 1e-10, 2e9, 1e9)

_model = CostModel()


def cost_model() -> CostModel:
    """The cost model in use."""
    return _model


def set_cost_model(model: CostModel) -> None:
    """Use this model for all plans made from now on. All ranks must set the same one."""
    global _model
    _model = model
    clear_all_caches()


@contextmanager
def using_cost_model(model: CostModel) -> Iterator[None]:
    """Plan with this model inside the block."""
    before = _model
    set_cost_model(model)
    try:
        yield
    finally:
        set_cost_model(before)
