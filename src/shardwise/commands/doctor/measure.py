"""Latency and bandwidth of the axes of a mesh, as a CostModel.

All groups of an axis communicate at the same time, as they do in a program, and a time is that of the slowest rank.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..._torch.collectives import all_gather, all_to_all, wait
from ...comm.cost import CostModel
from ...sharding.mesh import DeviceMesh, group_name

_WARM_UPS = 2
_REPEATS = 9


class AxisCosts(NamedTuple):
    """The costs measured on one axis: seconds of a small message, bytes per second of large ones."""

    latency: float
    bandwidth: float
    p2p_latency: float
    p2p_bandwidth: float


class Measured(NamedTuple):
    """The costs of each axis, and the seconds per byte of a copy."""

    axes: dict[str, AxisCosts]
    pack: float

    def cost_model(self) -> CostModel:
        """Return the model with these costs. The latency of an axis includes that for each peer."""
        rows = self.axes.items()
        return CostModel(
            latency={name: axis.latency for name, axis in rows},
            peer_latency=0.0,
            pack=self.pack,
            bandwidth={name: axis.bandwidth for name, axis in rows},
            p2p_latency={name: axis.p2p_latency for name, axis in rows},
            p2p_peer_latency=0.0,
            p2p_bandwidth={name: axis.p2p_bandwidth for name, axis in rows},
        )

    def code(self) -> str:
        """Return the call that installs the model, for a program."""

        def table(values: dict[str, float]) -> str:
            return "{" + ", ".join(f'"{name}": {value:.3g}' for name, value in values.items()) + "}"

        rows = self.axes.items()
        lines = ["shardwise.set_cost_model(", "    shardwise.CostModel("]
        lines.append(f"        latency={table({name: axis.latency for name, axis in rows})},")
        lines.append(f"        bandwidth={table({name: axis.bandwidth for name, axis in rows})},")
        lines.append(f"        p2p_latency={table({name: axis.p2p_latency for name, axis in rows})},")
        lines.append(f"        p2p_bandwidth={table({name: axis.p2p_bandwidth for name, axis in rows})},")
        lines.append(f"        peer_latency=0.0, p2p_peer_latency=0.0, pack={self.pack:.3g},")
        return "\n".join([*lines, "    )", ")"])


def measure(mesh: DeviceMesh, nbytes: int) -> Measured:
    """Measure every axis of more than one rank with messages of about this size. Call it on all ranks."""
    names = mesh.mesh_dim_names or ()
    axes = {name: _axis(mesh, axis, nbytes) for axis, name in enumerate(names) if mesh.size(axis) > 1}
    source = torch.ones(nbytes // 4, device=mesh.device_type).reshape(-1, 64)
    copied = _seconds(mesh, lambda: source.t().contiguous())
    return Measured(axes, copied / source.nbytes)


def _axis(mesh: DeviceMesh, axis: int, nbytes: int) -> AxisCosts:
    ranks, device = mesh.size(axis), mesh.device_type
    group = group_name(mesh, axis)

    def gather(elements: int) -> Callable[[], object]:
        piece = torch.ones(elements, device=device)
        return lambda: wait(all_gather(piece, ranks, group))

    def exchange(elements: int) -> Callable[[], object]:
        sent = torch.ones(elements * ranks, device=device)
        sizes = [elements] * ranks
        return lambda: wait(all_to_all(sent, sizes, sizes, group))

    elements = max(1, nbytes // 4 // ranks)
    received = 4.0 * elements * (ranks - 1)
    latency, p2p_latency = _seconds(mesh, gather(1)), _seconds(mesh, exchange(1))
    large, p2p_large = _seconds(mesh, gather(elements)), _seconds(mesh, exchange(elements))
    return AxisCosts(
        latency, _bandwidth(received, large, latency), p2p_latency, _bandwidth(received, p2p_large, p2p_latency)
    )


def _bandwidth(received: float, seconds: float, latency: float) -> float:
    """Return bytes per second, latency excluded. Noise must not make the time zero or negative."""
    return received / max(seconds - latency, seconds / 10, 1e-9)


def _seconds(mesh: DeviceMesh, call: Callable[[], object]) -> float:
    """Return the median time of a call, on the slowest rank."""
    for _ in range(_WARM_UPS):
        call()
    times = []
    for _ in range(_REPEATS):
        _finish(mesh)
        dist.barrier()
        start = time.perf_counter()
        call()
        _finish(mesh)
        times.append(time.perf_counter() - start)
    slowest = torch.tensor(times, dtype=torch.float64, device=mesh.device_type)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return statistics.median(slowest.tolist())


def _finish(mesh: DeviceMesh) -> None:
    if mesh.device_type != "cpu":
        torch.accelerator.synchronize()
