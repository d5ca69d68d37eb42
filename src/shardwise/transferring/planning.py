"""The plan of a transfer: for each tensor of the target the routes of its pieces, and buckets of bounded size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch

from ..comm.mesh_change import exchange_seconds
from ..comm.mesh_routes import MeshPair, RouteKey, mesh_pair, route_of
from ..comm.plan import bytes_text
from ..comm.routes import Route
from ..comm.streaming import rounds_of
from ..errors import CommunicationError
from ..sharding.spec import DTensorSpec
from .naming import Made, Piece

__all__ = ["Bucket", "Shipment", "TransferPlan", "buckets_of", "shipments_of"]


@dataclass(frozen=True)
class Shipment:
    """A piece of a target tensor, and its route."""

    name: str
    piece: Piece
    pair: MeshPair
    route: Route
    wire: torch.dtype
    """The dtype in which it is sent: that of source or target, whichever is smaller."""


@dataclass
class Bucket:
    """Shipments that share a collective, or a single large one that is sent in several rounds."""

    pair: MeshPair
    wire: torch.dtype
    shipments: list[Shipment] = field(default_factory=list)
    staged: dict[int, int] = field(default_factory=dict)
    """The number of elements that each rank sends and receives."""
    rounds: int = 1

    def add(self, shipment: Shipment, limit: int) -> bool:
        """Add a shipment, and return True, unless a rank would then send and receive more than `limit` elements."""
        before = self.staged.get
        staged = {rank: before(rank, 0) + count for rank, count in shipment.route.staged.items()}
        if self.shipments and max(staged.values()) > limit:
            return False
        self.shipments.append(shipment)
        self.staged |= staged
        return True


@dataclass(frozen=True)
class TransferPlan:
    """The plan of a transfer. It prints the meshes, the collectives, their bytes, buffers and modelled time.

    >>> weights = {"w": shardwise.zeros(8, 4, device_mesh=mesh["dp"], placements=[Shard(0)])}
    >>> plan_transfer(weights, mesh, lambda name, shape: P("tp")).collectives
    1
    """

    sources: dict[str, DTensorSpec]
    targets: dict[str, DTensorSpec]
    shipments: tuple[Shipment, ...]
    """The shipments of all pieces, also of those that no rank receives."""
    buckets: tuple[Bucket, ...]
    bucket_bytes: int

    @cached_property
    def received_by(self) -> dict[int, int]:
        """The bytes that each rank receives, which are those that it lacks."""
        totals: dict[int, int] = {}
        for shipment in self.shipments:
            for rank, count in shipment.route.received.items():
                totals[rank] = totals.get(rank, 0) + count * shipment.wire.itemsize
        return totals

    @property
    def collectives(self) -> int:
        """The number of collectives."""
        return sum(bucket.rounds for bucket in self.buckets)

    @cached_property
    def seconds(self) -> float:
        """The modelled seconds of all buckets."""
        return sum(
            exchange_seconds(
                bucket.pair, [shipment.route for shipment in bucket.shipments], bucket.wire.itemsize, bucket.rounds
            )
            for bucket in self.buckets
        )

    def __str__(self) -> str:
        count = f"{self.collectives} exchange{'' if self.collectives == 1 else 's'}"
        most, total = max(self.received_by.values(), default=0), sum(self.received_by.values())
        staged = max((b.wire.itemsize * -(-max(b.staged.values()) // b.rounds) for b in self.buckets), default=0)
        pairs = dict.fromkeys((shipment.pair.source, shipment.pair.target) for shipment in self.shipments)
        meshes = "; ".join(f"{source!r} -> {target!r}" for source, target in pairs)
        return (
            f"{len(self.sources)} tensors -> {len(self.targets)}   {meshes}\n"
            f"  {count}, {bytes_text(most)} received by a rank, {bytes_text(total)} by all\n"
            f"  at most {bytes_text(staged)} of buffers on a rank, about {self.seconds:.3g} s"
        )


def shipments_of(
    sources: Mapping[str, DTensorSpec], targets: Mapping[str, DTensorSpec], made: Mapping[str, Made]
) -> Iterable[Shipment]:
    """Yield the pieces of all tensors with their routes. Pieces with equal layouts share a route."""
    for name, target in targets.items():
        for piece in made[name].pieces:
            source = sources[piece.source]
            pair = mesh_pair(source.mesh_info, target.mesh_info)
            if target.layout.partial:
                raise CommunicationError(
                    f"transfer of {name!r} to {target!r}, which is Partial", "use Shard and Replicate placements"
                )
            key = RouteKey(source.layout.without_partial(), target.layout, segment=piece.segment)
            smaller = source.dtype.itemsize < target.dtype.itemsize
            yield Shipment(name, piece, pair, route_of(pair, key), source.dtype if smaller else target.dtype)


def buckets_of(shipments: Iterable[Shipment], limit: int) -> list[Bucket]:
    """Return the shipments in buckets, in order. Each pair of meshes and dtype has its own buckets."""
    full: list[Bucket] = []
    filling: dict[object, Bucket] = {}
    for shipment in shipments:
        if not shipment.route.received:
            continue
        key, elements = (shipment.pair, shipment.wire), limit // shipment.wire.itemsize
        bucket = filling.get(key)
        if bucket is None or not bucket.add(shipment, elements):
            bucket = filling[key] = Bucket(shipment.pair, shipment.wire)
            bucket.add(shipment, elements)
            full.append(bucket)
    for bucket in full:
        peers = max(map(len, bucket.pair.ranks)) - 1
        bucket.rounds = rounds_of(max(bucket.staged.values()), limit // bucket.wire.itemsize, peers)
    return full
