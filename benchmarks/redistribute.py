"""Redistribution, shardwise beside torch.distributed.tensor, in one run and through the same calls.

    traffic    what the 702 ordered pairs of Shard/Replicate placements of a 2x2x2 mesh cost in collectives and bytes
    cold       the first call for each pair
    warm       CPU time of a repeated Shard -> Replicate
    links      what planning by cost is worth when one axis is slower

All runs on PyTorch's fake process group: calls are real, nothing is sent. `--print` leaves README.md alone; so
does naming a part, `redistribute.py warm`, which runs that part only.
"""

from __future__ import annotations

import itertools
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.tensor as stock
from report import Report, microseconds
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise
from shardwise.comm.cost import Links
from shardwise.comm.planner import make_plan, shortest
from shardwise.comm.states import axes_to_exchange_over, common_slots, lacking
from shardwise.sharding.from_placements import from_placements
from shardwise.sharding.layout import Layout, aligned, canonical

LIBRARIES: dict[str, Any] = {"shardwise": shardwise, "PyTorch": stock}
DEVICES = {"cpu": "cpu", "meta": "accelerator"}  # tensors without data take the paths of an accelerator
MESH = (2, 2, 2)
SHAPE = (1024, 1024)  # 4 MiB of float32
NBYTES = SHAPE[0] * SHAPE[1] * 4


@contextmanager
def fake_world(ranks: int, rank: int = 0) -> Iterator[None]:
    """This process as one rank of a world in which collectives return at once."""
    hook = sys.excepthook
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook  # initialising chains one more


def all_placements(library: Any, axes: int) -> list[tuple[Any, ...]]:
    """Every way to place a 2-D tensor with Shard and Replicate: 27 for three axes, so 702 ordered pairs."""
    return list(itertools.product([library.Replicate(), library.Shard(0), library.Shard(1)], repeat=axes))


def tensor_of(library: Any, mesh: DeviceMesh, placements: Sequence[Any], shape: tuple[int, int] = SHAPE) -> Any:
    sizes = list(shape)
    for placement, pieces in zip(placements, mesh.shape, strict=True):
        if placement.is_shard():
            sizes[placement.dim] //= pieces
    local = torch.zeros(sizes, device=mesh.device_type)
    return library.DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=(shape[1], 1))


# ---- traffic ---------------------------------------------------------------------------------------------------------


NO_COLLECTIVES = ("wait_tensor", "_wrap_tensor_autograd")


class Collective(NamedTuple):
    received: int  # bytes this rank receives from others
    packed: int  # elements of its input
    result: int  # elements of its output


class Recorder(TorchDispatchMode):
    """Sees every functional collective that runs inside it, whichever library calls it."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.collectives: list[Collective] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if func is torch.ops._c10d_functional.all_to_all_single.default and args[1]:
            # Not run: the fake group refuses a rank that receives but has nothing to send, which real ones allow.
            result = args[0].new_empty((sum(args[1]), *args[0].shape[1:]))
        else:
            result = func(*args, **(kwargs or {}))
        if name.startswith(("_c10d_functional", "_dtensor")) and not name.endswith(NO_COLLECTIVES):
            self.collectives.append(self.collective(name.split("::")[1], args, result))
        return result

    def collective(self, name: str, args: tuple[Any, ...], result: torch.Tensor) -> Collective:
        """Count what this rank receives: never its own shard; in a ring all-reduce, each shard twice."""
        sent = args[0]
        ranks = dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(args[-1]))
        peers, me = len(ranks), ranks.index(self.rank)
        if name == "all_gather_into_tensor":
            received = sent.numel() * (peers - 1)
        elif name == "all_to_all_single":
            splits = args[1] or [sent.shape[0] // peers] * peers
            received = (sum(splits) - splits[me]) * (result.numel() // max(result.shape[0], 1))
        elif name in ("reduce_scatter_tensor", "shard_dim_alltoall"):
            received = sent.numel() * (peers - 1) // peers
        elif name == "all_reduce":
            received = 2 * sent.numel() * (peers - 1) // peers
        else:
            raise SystemExit(f"{name}: a collective this benchmark does not know")
        return Collective(received * result.element_size(), sent.numel(), result.numel())


class Traffic(NamedTuple):
    """Collectives, bytes received; whether a collective leaves, or takes, more than max(source, target)."""

    collectives: int
    received: int
    peaks: bool
    packs_more: bool


def traffic_of_rank(library: Any, device: str, rank: int) -> list[Traffic]:
    """One entry for each pair, as this rank sees it."""
    result = []
    with fake_world(8, rank):
        mesh = init_device_mesh(device, MESH, mesh_dim_names=("a", "b", "c"))
        for source, target in itertools.permutations(all_placements(library, 3), 2):
            tensor = tensor_of(library, mesh, source)
            with Recorder(rank) as recorder:
                moved = tensor.redistribute(mesh, target)
            limit = max(tensor.to_local().numel(), moved.to_local().numel())
            seen = recorder.collectives
            peaks, packs_more = any(c.result > limit for c in seen), any(c.packed > limit for c in seen)
            result.append(Traffic(len(seen), sum(c.received for c in seen), peaks, packs_more))
    return result


def traffic(library: Any, device: str) -> list[Traffic]:
    """One entry for each pair: the rank that receives most. Ranks differ, so every rank 0..7 is played in turn."""
    by_rank = [traffic_of_rank(library, device, rank) for rank in range(8)]
    return [Traffic(*map(max, zip(*ranks, strict=True))) for ranks in zip(*by_rank, strict=True)]


def layouts(mesh_sizes: tuple[int, ...]) -> list[Layout]:
    return [from_placements(mesh_sizes, SHAPE, p) for p in all_placements(shardwise, len(mesh_sizes))]


def most_lacking(source: Layout, target: Layout) -> float:
    """The lower bound: the bytes that the rank that lacks most of its target lacks."""
    slots = common_slots(source, target)
    assert slots is not None
    return lacking(source.mesh_sizes, slots.source, slots.target) * NBYTES


def report_traffic(report: Report) -> None:
    bound = sum(most_lacking(a, b) for a, b in itertools.permutations(layouts(MESH), 2))
    rows = []
    for (device, where), (name, library) in itertools.product(DEVICES.items(), LIBRARIES.items()):
        pairs = traffic(library, device)
        collectives, received, peaks, packs_more = (sum(column) for column in zip(*pairs, strict=True))
        rows.append([f"{name}, {where}", str(collectives), f"{received / bound:.3f}", str(peaks), str(packs_more)])
    report.table(
        "All 702 ordered Shard/Replicate pairs on a 2x2x2 mesh, 4 MiB tensor",
        ["", "collectives", "bytes / bound", "peaks", "larger send buffers"],
        rows,
    )
    report.add(
        "The bound is the number of bytes of its target shard that a rank does not hold yet, for the rank where that "
        "is most. A peak is a pair for which some rank, after a step, holds more than max(source, target); the last "
        "column counts pairs for which the data packed for one collective is larger than that. On CPU PyTorch "
        "replaces all-to-all by all-gather."
    )


# ---- cold: the first call for a pair ------------------------------------------------------------------------------


def first_calls(library: Any) -> list[float]:
    """For each pair, milliseconds by which the first call, on a small tensor, exceeds the second."""
    result = []
    with fake_world(8):
        mesh = init_device_mesh("cpu", MESH, mesh_dim_names=("a", "b", "c"))
        tensors = [(p, tensor_of(library, mesh, p, (64, 64))) for p in all_placements(library, 3)]
        for (_, tensor), (target, _) in itertools.permutations(tensors, 2):
            first, second = (timed(lambda t=tensor, to=target: t.redistribute(mesh, to)) for _ in range(2))
            result.append(first - second)
    return result


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def planning() -> list[float]:
    """For each pair, milliseconds of the planner alone, best of three, with nothing remembered of plans before."""
    links = Links.uniform(500e-6, 20e-6, 1e-10, (2e9,) * 3)

    def once(source: Layout, target: Layout) -> float:
        for cache in (make_plan, shortest, aligned, canonical):
            cache.cache_clear()
        return timed(lambda: make_plan(source, target, 4, links))

    return [min(once(*pair) for _ in range(3)) for pair in itertools.permutations(layouts(MESH), 2)]


def report_cold(report: Report) -> None:
    measured = {"shardwise, planner alone": planning()}
    for name, library in LIBRARIES.items():
        measured[f"{name}, first call minus second"] = first_calls(library)
    rows = [[name, f"{sum(ms) / len(ms):.3f}", f"{max(ms):.2f}"] for name, ms in measured.items()]
    report.table("First call for a pair, over the 702 pairs", ["", "mean ms", "max ms"], rows)


# ---- warm: a repeated call ----------------------------------------------------------------------------------------


def warm_call(library: Any, mesh: DeviceMesh, requires_grad: bool, backward: bool) -> Callable[[], object]:
    """A Shard -> Replicate call on a small tensor, perhaps with its backward."""
    source, target = [library.Shard(0)], [library.Replicate()]
    tensor = library.DTensor.from_local(torch.zeros(4, 16), mesh, source, run_check=False).detach()
    tensor.requires_grad_(requires_grad)
    if not backward:
        return lambda: tensor.redistribute(mesh, target)
    gradient = library.DTensor.from_local(torch.zeros(16, 16), mesh, target, run_check=False)
    return lambda: torch.autograd.grad(tensor.redistribute(mesh, target), tensor, gradient)


def report_warm(report: Report) -> None:
    cases = {"no grad": (False, False), "with grad": (True, False), "with grad, and backward": (True, True)}
    rows = []
    with fake_world(4):
        mesh = init_device_mesh("cpu", (4,))
        for case, flags in cases.items():
            ours, theirs = microseconds(*(warm_call(library, mesh, *flags) for library in LIBRARIES.values()))
            rows.append([case, f"{ours:.1f}", f"{theirs:.1f}", f"{ours / theirs:.2f}"])
    title = "CPU time of a repeated `redistribute`, Shard(0) -> Replicate over 4 ranks, small tensor"
    report.table(title, ["", "shardwise us", "PyTorch us", "ratio"], rows)


# ---- links: one axis slower than the other ------------------------------------------------------------------------


def report_links(report: Report) -> None:
    """Modelled time of the plans beside the modelled time of sending everything in one exchange."""
    mesh, bandwidth = (4, 8), 1e9
    rows = []
    for slower in (1, 2, 8):
        links = Links.uniform(0.25 * NBYTES / bandwidth, 0.0, 0.05 / bandwidth, (bandwidth / slower, bandwidth))
        planned = one_shot = 0.0
        for source, target in itertools.permutations(layouts(mesh), 2):
            planned += make_plan(source, target, 4, links).seconds
            slots = common_slots(source, target)
            assert slots is not None
            axes, received = axes_to_exchange_over(slots.source, slots.target), most_lacking(source, target)
            if axes:
                one_shot += links.seconds(axes, 1, received) + links.pack * received
        rows.append([f"outer axis {slower} times slower" if slower > 1 else "equal axes", f"{planned / one_shot:.3f}"])
    report.table("72 pairs on a 4x8 mesh: modelled time of the plans over that of one exchange", ["", "ratio"], rows)


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    report = Report("redistribute")
    parts = {"traffic": report_traffic, "cold": report_cold, "warm": report_warm, "links": report_links}
    chosen = [name for name in parts if name in sys.argv]
    for name in chosen or parts:
        parts[name](report)
    if not chosen:
        report.save()


if __name__ == "__main__":
    main()
