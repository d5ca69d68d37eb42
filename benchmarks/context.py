"""What attention over a sharded sequence holds in memory and how long it takes, by method, next to PyTorch.

    python benchmarks/context.py [--print] [--device cuda]

Memory is that of the last rank of 8 on a process group that moves nothing: the bytes of all tensors that are alive at
once, besides queries, keys and values. Times are those of 4 gloo processes. With `--device cuda`, memory and times of
one process on a GPU are printed, on the group that moves nothing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from launch import on_processes
from report import Report
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwise import DTensor, Replicate, Shard
from shardwise.nn import attention_over_sequence
from shardwise.testing.live_bytes import LiveBytes

METHODS = ("ring", "heads", "gather")
REDISTRIBUTED = "keys and values redistributed to Replicate()"
PROCESSES = 4
MIB = 2**20


def shards(mesh: Any, length: int, heads: int, width: int, device: str, dtype: torch.dtype) -> list[DTensor]:
    """Queries, keys and values of this rank, which need gradients."""
    shape = (1, heads, length // mesh.size(), width)
    return [
        DTensor.from_local(torch.randn(shape, device=device, dtype=dtype), mesh, [Shard(2)]).requires_grad_()
        for _ in range(3)
    ]


def attend(method: Any, tensors: list[DTensor], zigzag: bool = False) -> Tensor:
    query, key, value = tensors
    if method == REDISTRIBUTED:
        key, value = (tensor.redistribute(placements=[Replicate()]) for tensor in (key, value))
        return F.scaled_dot_product_attention(query, key, value)  # a causal mask would gather the queries, too
    with attention_over_sequence(method, zigzag=zigzag):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


# ---- memory ---------------------------------------------------------------------------------------------------------


def memory(report: Report, ranks: int = 8, length: int = 8192, heads: int = 8, width: int = 64) -> None:
    # The last rank: in causal attention it looks at all blocks.
    dist.init_process_group("fake", rank=ranks - 1, world_size=ranks, store=FakeStore())
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
    found = {}
    for method in (*METHODS, REDISTRIBUTED):
        tensors = shards(mesh, length, heads, width, "cpu", torch.float32)
        attend(method, tensors).sum().backward()  # plans are made
        for tensor in tensors:
            tensor.grad = None
        with LiveBytes() as counted:
            output = attend(method, tensors)
            forward = counted.peak
            gradient = torch.ones_like(output)
            counted.start()
            output.backward(gradient)
        found[method] = forward, counted.peak
    block = 2 * heads * (length // ranks) * width * 4
    rows = []
    for method, peaks in found.items():
        ratios = [peak / gathered for peak, gathered in zip(peaks, found["gather"], strict=True)]
        cells = [f"{peaks[0] / MIB:.1f}", f"{peaks[1] / MIB:.1f}", *(f"{ratio:.3f}" for ratio in ratios)]
        rows.append([method, *cells])
    shape = f"{length} positions, {heads} heads of {width}, float32, {ranks} ranks"
    title = f"Memory, {shape}, keys and values of a rank: {block / MIB:.1f} MiB"
    report.table(title, ["method", "forward MiB", "backward MiB", "of gather", "of gather"], rows)
    dist.destroy_process_group()


# ---- times ----------------------------------------------------------------------------------------------------------


def milliseconds(step: Callable[[], object], repeats: int = 5) -> float:
    best = float("inf")
    for _ in range(repeats):
        if dist.get_backend() != "fake":
            dist.barrier()
        start = time.perf_counter()
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best * 1e3


def pytorch(mesh: Any, tensors: list[DTensor], rotate: str) -> Callable[[], object]:
    """The same with PyTorch's `context_parallel` on the local shards."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    local = [tensor.to_local().detach().requires_grad_() for tensor in tensors]

    def step() -> None:
        set_rotate_method(rotate)
        some = torch.zeros(2 * mesh.size(), device=local[0].device)  # it does not run without a buffer
        with context_parallel(mesh, buffers=[some], buffer_seq_dims=[0]):
            F.scaled_dot_product_attention(*local, is_causal=True).sum().backward()

    return step


def time_of(step: Callable[[], object]) -> str:
    try:
        step()
        return f"{milliseconds(step):.1f}"
    except Exception as error:  # PyTorch's runs on some devices only
        return f"{type(error).__name__}"


def steps(mesh: Any, tensors: list[DTensor]) -> dict[str, Callable[[], object]]:
    found: dict[str, Callable[[], object]] = {
        method: lambda method=method: attend(method, tensors).sum().backward()  # type: ignore[misc]
        for method in METHODS
    }
    found["ring, head-tail order"] = lambda: attend("ring", tensors, zigzag=True).sum().backward()
    for rotate in ("allgather", "alltoall"):
        found[f"PyTorch's context_parallel, {rotate}"] = pytorch(mesh, tensors, rotate)
    return found


def run() -> list[list[str]]:
    mesh = init_device_mesh("cpu", (PROCESSES,), mesh_dim_names=("cp",))
    tensors = shards(mesh, 2048, 8, 64, "cpu", torch.float32)
    return [[name, str(time_of(step))] for name, step in steps(mesh, tensors).items()]


def times(report: Report) -> None:
    rows = on_processes(run, PROCESSES)
    title = f"Causal attention forward and backward, {PROCESSES} gloo processes, 2048 positions, 8 heads of 64, float32"
    report.table(title, ["method", "ms"], rows)


# ---- on a GPU -------------------------------------------------------------------------------------------------------


def on_gpu(report: Report, ranks: int = 8, length: int = 65536) -> None:
    dist.init_process_group("fake", rank=ranks - 1, world_size=ranks, store=FakeStore())
    mesh = init_device_mesh("cuda", (ranks,), mesh_dim_names=("cp",))
    rows = []
    tensors = shards(mesh, length, 16, 128, "cuda", torch.bfloat16)
    for name, step in steps(mesh, tensors).items():
        taken = time_of(step)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        time_of(step)
        rows.append([name, taken, f"{(torch.cuda.max_memory_allocated() - before) / MIB:.0f}"])
    title = f"{torch.cuda.get_device_name()}, one process, {length} positions, 16 heads of 128, bfloat16, {ranks} ranks"
    report.table(title, ["method", "ms", "peak MiB"], rows)
    dist.destroy_process_group()


def main() -> None:
    report = Report("context-cuda" if "cuda" in sys.argv else "context")
    if "cuda" in sys.argv:
        on_gpu(report)
        return
    memory(report)
    times(report)
    report.save()


if __name__ == "__main__":
    sys.exit(main())
