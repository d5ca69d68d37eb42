"""A model's state from a trainer's mesh to a generator's.

plans        planning fsdp 16 -> tp 2 x 8 for the shapes of an 8B decoder, and bytes beside the bound
processes    4 gloo processes: `transfer` beside gathering each tensor and broadcasting it

python benchmarks/transfer.py [--print]
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from launch import on_processes
from report import Report
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import shardwise
from shardwise import DTensorSpec, Replicate, Shard
from shardwise.sharding.spec import contiguous_meta
from shardwise.testing.live_bytes import LiveBytes
from shardwise.transferring import Part

RANKS = 4


def decoder(layers: int, width: int, kv: int, hidden: int, words: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the weights of a decoder."""
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (words, width), "head.weight": (words, width)}
    shapes["norm.weight"] = (width,)
    for layer in range(layers):
        for name, shape in {
            "q": (width, width),
            "k": (kv, width),
            "v": (kv, width),
            "o": (width, width),
            "gate": (hidden, width),
            "up": (hidden, width),
            "down": (width, hidden),
            "norm1": (width,),
            "norm2": (width,),
        }.items():
            shapes[f"layers.{layer}.{name}.weight"] = shape
    return shapes


EIGHT_BILLION = decoder(32, 4096, 1024, 14336, 128256)
SMALL = decoder(4, 1024, 256, 2816, 8192)


def tensor_parallel(name: str, shape: torch.Size) -> list[Any]:
    """The placements of a generator on a mesh of dp and tp."""
    if len(shape) == 1:
        return [Replicate(), Replicate()]
    return [Replicate(), Shard(1 if ".o." in name or ".down." in name else 0)]


def fuse(ranks: int) -> Callable[[str], Any]:
    """Fuse q, k and v, and gate and up, into one weight each; each rank has its rows."""
    fused = {"q": ("qkv", 0), "k": ("qkv", 1), "v": ("qkv", 2), "gate": ("gate_up", 0), "up": ("gate_up", 1)}

    def convert(name: str) -> Any:
        *path, last, weight = name.split(".")
        if last not in fused:
            return name
        target, index = fused[last]
        return Part(".".join([*path, target, weight]), index, groups=ranks)

    return convert


# ---- plans -----------------------------------------------------------------------------------------------------------


def planned(target: list[int], convert: Any, ranks: int) -> list[str]:
    """CPU seconds of planning, in a world where nothing was planned yet, and bytes beside the bound."""
    with shardwise.simulate(ranks):
        trainer = DeviceMesh("cpu", list(range(16)), mesh_dim_names=("fsdp",))
        generator = DeviceMesh("cpu", torch.tensor(target).view(2, 8), mesh_dim_names=("dp", "tp"))
        metas = {name: contiguous_meta(shape, torch.bfloat16) for name, shape in EIGHT_BILLION.items()}
        state = {name: DTensorSpec(trainer, [Shard(0)], meta) for name, meta in metas.items()}
        for mesh in (trainer, generator):  # first uses of meshes make their groups
            shardwise.zeros(1, device_mesh=mesh, placements=[Replicate()] * mesh.ndim)
        gc.collect()
        start = time.process_time()
        plan = shardwise.plan_transfer(state, generator, tensor_parallel, convert=convert)
        seconds = time.process_time() - start
        for shipment in plan.shipments:
            for rank in range(ranks):
                shipment.route.sends(rank), shipment.route.receives(rank), shipment.route.own(rank)
        every = time.process_time() - start
        start = time.process_time()
        shardwise.plan_transfer(state, generator, tensor_parallel, convert=convert)
        again = time.process_time() - start
        received = sum(plan.received_by.values())
        bound = sum(lacking(plan, rank) for rank in range(ranks))
    cells = [f"{seconds * 1e3:.0f}", f"{every * 1e3:.0f}", f"{again * 1e3:.0f}", str(plan.collectives)]
    return [*cells, f"{received / 2**30:.3f}", f"{received / bound:.6f}"]


def lacking(plan: Any, rank: int) -> int:
    """The bytes that a rank needs and does not have, from the sizes of intersections of intervals."""
    total = 0
    for name, target in plan.targets.items():
        info = target.mesh_info
        if rank not in info.ranks:
            continue
        need = target.layout.runs(info.coordinates[info.ranks.index(rank)])
        total += 2 * _volume(need)
        for shipment in (each for each in plan.shipments if each.name == name):
            source = plan.sources[shipment.piece.source]
            if rank in source.mesh_info.ranks:
                have = source.layout.runs(source.mesh_info.coordinates[source.mesh_info.ranks.index(rank)])
                total -= 2 * _common(have, need, shipment.piece.segment)
    return total


def _volume(runs: Any) -> int:
    result = 1
    for dim in runs:
        result *= sum(stop - start for start, stop in dim)
    return result


def _common(have: Any, need: Any, segment: Any) -> int:
    result = 1
    for dim, (one, other) in enumerate(zip(have, need, strict=True)):
        pairs = [(a, b, c, d) for a, b in one for c, d in other]
        if segment is not None and segment.dim == dim:
            low, shift = segment.start, segment.target_start - segment.start
            pairs = [(max(a, low) + shift, min(b, low + segment.length) + shift, c, d) for a, b, c, d in pairs]
        result *= sum(max(0, min(b, d) - max(a, c)) for a, b, c, d in pairs)
    return result


# ---- processes -------------------------------------------------------------------------------------------------------


def gather_and_broadcast(state: dict[str, Any], trainer: DeviceMesh, generator: DeviceMesh) -> dict[str, Any]:
    """Transfer without shardwise: gather each tensor on the trainer, broadcast it, and keep a shard."""
    first, found = int(trainer.mesh.flatten()[0]), {}
    inside = dist.get_rank() in trainer.mesh
    for name, tensor in state.items():
        gathered = tensor.full_tensor() if inside else torch.empty(tensor.shape)
        dist.broadcast(gathered, src=first)
        placements = tensor_parallel(name, tensor.shape)
        found[name] = shardwise.distribute_tensor(gathered, generator, placements, src_data_rank=None)
    return found


def distributed(shapes: dict[str, tuple[int, ...]], mesh: DeviceMesh) -> dict[str, Any]:
    tensors: dict[str, Tensor] = {name: torch.ones(shape) for name, shape in shapes.items()}
    return {n: shardwise.distribute_tensor(t, mesh, [Shard(0)], src_data_rank=None) for n, t in tensors.items()}


def timed(call: Callable[[], object]) -> tuple[float, int]:
    """The best time of all ranks together, and the most bytes that live on this rank during a call."""
    best = float("inf")
    for _ in range(5):
        dist.barrier()
        start = time.perf_counter()
        kept = call()
        dist.barrier()
        best = min(best, time.perf_counter() - start)
        del kept
    with LiveBytes() as counted:
        call()
    most = torch.tensor([counted.peak])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return best, int(most)


def compared(title: str, first: list[int], second: list[list[int]]) -> list[list[str]]:
    """The time and memory of transfers between two meshes."""
    trainer = DeviceMesh("cpu", first, mesh_dim_names=("fsdp",))
    generator = DeviceMesh("cpu", second, mesh_dim_names=("dp", "tp"))
    state = distributed(SMALL, trainer)

    def ours(dtype: torch.dtype | None = None) -> object:
        return shardwise.transfer(state, generator, tensor_parallel, bucket_bytes=16 << 20, dtype=dtype)

    found = {
        "transfer": timed(ours),
        "transfer, cast to bfloat16": timed(lambda: ours(torch.bfloat16)),
        "gather and broadcast": timed(lambda: gather_and_broadcast(state, trainer, generator)),
    }
    other = found["gather and broadcast"][0]
    return [
        [f"{title}: {name}", f"{seconds * 1e3:.0f}", f"{seconds / other:.2f}", f"{peak / 2**20:.0f}"]
        for name, (seconds, peak) in found.items()
    ]


def run() -> None:
    rows = compared("fsdp 4 -> tp 2 x 2, the same ranks", [0, 1, 2, 3], [[0, 1], [2, 3]])
    rows += compared("fsdp 2 -> tp 1 x 2, other ranks", [0, 1], [[2, 3]])
    if dist.get_rank() == 0:
        report = Report("transfer")
        header = ["", "ms", "and all ranks' boxes, ms", "again, ms", "exchanges", "received, GiB", "of the bound"]
        same, other = list(range(16)), list(range(16, 32))
        report.table(
            "Planning the transfer of an 8B decoder, fsdp 16 -> tp 2 x 8, bfloat16 (CPU time)",
            header,
            [
                ["the same 16 ranks", *planned(same, None, 16)],
                ["16 other ranks", *planned(other, None, 32)],
                ["16 other ranks, q k v and gate up fused", *planned(other, fuse(8), 32)],
            ],
        )
        size = sum(torch.Size(shape).numel() for shape in SMALL.values()) * 4 / 2**20
        report.table(
            f"4 gloo processes, {size:.0f} MiB of weights, buckets of 16 MiB",
            ["", "ms", "of gather and broadcast", "most MiB made on a rank"],
            rows,
        )
        report.save()


def main() -> None:
    on_processes(run, RANKS)


if __name__ == "__main__":
    sys.exit(main())
