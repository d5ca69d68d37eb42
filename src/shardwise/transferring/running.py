"""Run a transfer: bucket by bucket, with at most two collectives in flight."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..comm.mesh_move import places_here, shards_here
from ..comm.on_ranks import shard_outside
from ..comm.rank_group import group_over
from ..comm.streaming import Load, Shards, Slice, copy_own, start_round
from ..sharding.placement import Replicate
from ..sharding.spec import DTensorSpec
from ..tensor.dtensor import DTensor
from ..world import RankTensor
from .planning import Bucket, Shipment, TransferPlan

__all__ = ["TransferRun", "run"]


def run(plan: TransferPlan, state: Mapping[str, Tensor], into: Mapping[str, DTensor]) -> dict[str, DTensor]:
    """Transfer the tensors of a state dict, into existing or new tensors."""
    with torch.no_grad():
        return TransferRun(plan, state, into).run()


class TransferRun:
    """One transfer, with the local shards of source and target that this process holds."""

    def __init__(self, plan: TransferPlan, state: Mapping[str, Tensor], into: Mapping[str, DTensor]) -> None:
        self.plan, self.state, self.into = plan, state, into
        self.made: dict[str, dict[int, Tensor]] = {}
        self.reduced: dict[str, Shards] = {}
        self.device = next((t.device for t in state.values()), None)

    def run(self) -> dict[str, DTensor]:
        for shipment in self.plan.shipments:
            if not shipment.route.sent:  # in no bucket: no rank receives any of it
                copy_own(self._load(shipment))
        under_way: list[Callable[[], None]] = []
        for bucket in self.plan.buckets:
            self._send(bucket, under_way)
        for finish in under_way:
            finish()
        return {name: self._wrapped(name, spec) for name, spec in self.plan.targets.items()}

    def _send(self, bucket: Bucket, under_way: list[Callable[[], None]]) -> None:
        """Run the rounds of a bucket. A round is packed while the last one is in flight; at most two are in flight."""
        loads = [self._load(shipment) for shipment in bucket.shipments]
        self.reduced.clear()
        for load in loads:
            copy_own(load)
        if bucket.pair.outside:
            return
        group, device = group_over(bucket.pair.ranks), self._device(bucket)
        for turn in range(bucket.rounds):
            if len(under_way) == 2:
                under_way.pop(0)()
            slices = [Slice(load, turn, bucket.rounds) for load in loads]
            under_way.append(start_round(slices, group, bucket.wire, device))

    def _load(self, shipment: Shipment) -> Load:
        return Load(shipment.route, self._source(shipment.piece.source), self._target(shipment.name))

    def _source(self, name: str) -> Shards:
        spec = self.plan.sources[name]
        tensor = self.state.get(name)
        if tensor is None or not places_here(spec.mesh_info):
            return {}
        if not isinstance(tensor, DTensor):  # replicated
            shards = tensor.shards if isinstance(tensor, RankTensor) else [tensor] * len(places_here(spec.mesh_info))
            return {rank: shard for (rank, _), shard in zip(places_here(spec.mesh_info), shards, strict=True)}
        if spec.layout.partial:
            if name not in self.reduced:
                placements = [Replicate() if p.is_partial() else p for p in tensor.placements]
                self.reduced[name] = shards_here(
                    tensor.redistribute(placements=placements)._local_shard, spec.mesh_info
                )
            return self.reduced[name]
        return shards_here(tensor._local_shard, spec.mesh_info)

    def _target(self, name: str) -> dict[int, Tensor]:
        found = self.made.get(name)
        if found is None:
            spec = self.plan.targets[name]
            found = self.made[name] = self._existing(name, spec) if name in self.into else self._allocated(spec)
        return found

    def _existing(self, name: str, spec: DTensorSpec) -> dict[int, Tensor]:
        return {} if spec.mesh_info.outside else self.into[name].shards

    def _allocated(self, spec: DTensorSpec) -> dict[int, Tensor]:
        kind = spec.mesh_info.device_type
        device = self.device if self.device is not None and self.device.type == kind else torch.device(kind)
        return {
            rank: torch.empty(spec.layout.local_shape(at), dtype=spec.dtype, device=device)
            for rank, at in places_here(spec.mesh_info)
        }

    def _device(self, bucket: Bucket) -> torch.device:
        kind = bucket.pair.source.device_type
        return self.device if self.device is not None and self.device.type == kind else torch.device(kind)

    def _wrapped(self, name: str, spec: DTensorSpec) -> DTensor:
        shards = self._target(name)
        if name in self.into:
            torch.autograd.graph.increment_version(self.into[name])
            return self.into[name]
        if not shards:
            return DTensor.wrap(shard_outside(spec.ndim, spec.dtype, torch.device(spec.mesh_info.device_type)), spec)
        local = RankTensor(shards.values()) if spec.mesh_info.simulated else next(iter(shards.values()))
        return DTensor.wrap(local, spec)
