"""A training step as written, erased, and written by hand, beside PyTorch's DTensor.

Rank 0 of 4 on PyTorch's fake process group, where collectives return at once, on the CPU, or with --device cuda on a
GPU. The step is forward, backward and AdamW of transformer blocks with tensor and sequence parallel styles, or sharded
data parallel by placement: each parameter is sharded over all ranks and gathered where it is used.
"""

from __future__ import annotations

import argparse
import gc
import signal
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from report import Report
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from training import BATCH, BLOCKS, DIM, HEADS, HIDDEN, LENGTH, Block, Step, all_distributed, milliseconds, step

import shardwise
from shardwise import init_device_mesh

RANKS = 4
"""Ranks of the fake group."""


# ---- written by hand ------------------------------------------------------------------------------------------------


class Move(torch.autograd.Function):
    """Gather the sequence from all ranks, or sum over all ranks and keep a shard; the gradient does the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, there: Callable[..., Tensor], back: Callable[..., Tensor]) -> Tensor:
        ctx.group, ctx.back = group, back
        return there(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(grad, ctx.group), None, None, None


c10d = torch.ops._c10d_functional


def gathered(x: Tensor, group: str) -> Tensor:
    parts = c10d.wait_tensor(c10d.all_gather_into_tensor(x.contiguous(), RANKS, group))
    return torch.cat(parts.chunk(RANKS), 1)


def summed(x: Tensor, group: str) -> Tensor:
    parts = torch.cat(x.chunk(RANKS, 1))
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(parts, "sum", RANKS, group))


class LocalBlock(nn.Module):
    """A block as one rank runs it: a quarter of the heads and of the hidden features."""

    def __init__(self, group: str) -> None:
        super().__init__()
        self.group = group
        self.norm_1, self.norm_2 = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.q, self.k, self.v = (nn.Linear(DIM, DIM // RANKS, bias=False) for _ in range(3))
        self.out = nn.Linear(DIM // RANKS, DIM, bias=False)
        self.gate, self.up = (nn.Linear(DIM, HIDDEN // RANKS, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN // RANKS, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = Move.apply(self.norm_1(x), self.group, gathered, summed)
        q, k, v = (w(y).view(BATCH, LENGTH, -1, DIM // HEADS).transpose(1, 2) for w in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(BATCH, LENGTH, -1)
        x = x + Move.apply(self.out(y), self.group, summed, gathered)
        y = Move.apply(self.norm_2(x), self.group, gathered, summed)
        return x + Move.apply(self.down(F.silu(self.gate(y)) * self.up(y)), self.group, summed, gathered)


def by_hand(mesh: Any, device: str, blocks: int) -> Step:
    group = mesh.get_group().group_name
    torch.manual_seed(0)
    model = nn.Sequential(*(LocalBlock(group) for _ in range(blocks))).to(device)
    norms = [p for name, p in model.named_parameters() if "norm" in name]
    x = torch.randn(BATCH, LENGTH // RANKS, DIM, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)

    def run() -> None:
        optimizer.zero_grad()
        loss = model(x).square().mean() / RANKS
        loss.backward()
        for p in norms:  # the weights of norms see a shard of the sequence on each rank
            p.grad = c10d.wait_tensor(c10d.all_reduce(p.grad, "sum", group))
        optimizer.step()

    return run


def gathered_rows(x: Tensor, group: str) -> Tensor:
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x, RANKS, group))


def summed_rows(grad: Tensor, group: str) -> Tensor:
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(grad.contiguous(), "sum", RANKS, group))


def sharded_by_hand(mesh: Any, device: str, blocks: int) -> Step:
    """Each parameter is a quarter of its rows, gathered before it is used, in forward; autograd keeps it."""
    group = mesh.get_group().group_name
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(blocks))).to(device)
    shards = {name: nn.Parameter(p.detach().chunk(RANKS)[0].clone()) for name, p in model.named_parameters()}
    x = torch.randn(BATCH // RANKS, LENGTH, DIM, device=device)
    optimizer = torch.optim.AdamW(shards.values(), lr=1e-3, foreach=True)

    def run() -> None:
        optimizer.zero_grad()
        weights = {name: Move.apply(p, group, gathered_rows, summed_rows) for name, p in shards.items()}
        (torch.func.functional_call(model, weights, (x,)).square().mean() / RANKS).backward()
        optimizer.step()

    return run


# ---- with shardwise, and with PyTorch's DTensor ---------------------------------------------------------------------


def sharded(library: Any, mesh: Any, device: str, blocks: int, compiled: bool = False) -> Step:
    """Sharded data parallel by placement."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(blocks))).to(device)
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            shard = library.distribute_tensor(p.detach(), mesh, [library.Shard(0)])
            module.register_parameter(name, nn.Parameter(shard))
    x = library.distribute_tensor(torch.randn(BATCH, LENGTH, DIM, device=device), mesh, [library.Shard(0)])
    return step(model, x, compiled)


def peak_bytes(run: Step) -> int:
    """The most memory that a step needs on a GPU, above what is there before it."""
    for _ in range(3):
        run()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def works(name: str, run: Step) -> bool:
    """Whether a step runs; otherwise the error is printed."""
    try:
        for _ in range(2):
            run()
    except Exception as error:
        print(f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:100]}", flush=True)
        return False
    return True


class OutOfTime(BaseException):
    """A step has run longer than it may. Not an `Exception`, which the compiler would take for an error of its own."""


def finishes(name: str, run: Step, seconds: int) -> bool:
    """Whether the first two runs of a step, in which it is compiled, take no longer than this."""

    def stop(*_: object) -> None:
        raise OutOfTime

    print(f"{name}: compiling", end="", flush=True)
    start = time.perf_counter()
    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        done = works(name, run)
    except OutOfTime:
        print(f", not finished in {seconds} s", flush=True)
        return False
    finally:
        signal.alarm(0)
    print(f", {time.perf_counter() - start:.0f} s", flush=True)
    return done


def steps_of(kind: str, mesh: Any, device: str, blocks: int, limit: int) -> tuple[dict[str, Step], dict[str, float]]:
    """The ways to run one step, and how long recording took. Compiled ones may take `limit` seconds to compile."""
    import torch.distributed.tensor as theirs

    make: dict[str, Callable[..., Step]] = {
        "tensor and sequence parallel": lambda lib, *how: all_distributed(lib.__name__, mesh, device, blocks, *how),
        "sharded data parallel": lambda library, *how: sharded(library, mesh, device, blocks, *how),
    }
    hand = {"tensor and sequence parallel": by_hand, "sharded data parallel": sharded_by_hand}[kind]
    runs: dict[str, Step] = {"by hand": hand(mesh, device, blocks), "shardwise eager": make[kind](shardwise)}
    recording = {}
    for backend in ("eager", "cudagraph") if device == "cuda" else ("eager",):
        erased = shardwise.erase(make[kind](shardwise), backend=backend)
        start = time.perf_counter()
        erased()
        recording[f"erased, {backend}"] = time.perf_counter() - start
        runs[f"erased, {backend}"] = erased
    runs["PyTorch eager"] = make[kind](theirs)
    runs = {name: run for name, run in runs.items() if works(name, run)}
    for library, name in ((shardwise, "shardwise compiled"), (theirs, "PyTorch compiled")) if limit else ():
        run = make[kind](library, True)
        if finishes(f"{name}, {kind}", run, limit):
            runs[name] = run
    return runs, recording


def guard_microseconds(erased: Any) -> float:
    replay = erased._replay()
    start = time.perf_counter()
    for _ in range(1000):
        replay.guards.hold()
    return (time.perf_counter() - start) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--blocks", type=int, nargs="+", default=[BLOCKS, 4 * BLOCKS])
    parser.add_argument("--compile", action="store_true", help="torch.compile of 4 blocks, forward and backward, too")
    parser.add_argument("--limit", type=int, default=240, help="seconds that compiling one step may take")
    parser.add_argument("--print", action="store_true", help="do not update README.md")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    mesh = init_device_mesh(options.device, (RANKS,), mesh_dim_names=("tp",))
    report = Report("erase" if options.device == "cpu" else "erase-cuda")
    if options.device == "cuda":
        report.add(f"{torch.cuda.get_device_name()}.")
    for kind in ("tensor and sequence parallel", "sharded data parallel"):
        for blocks in options.blocks:
            limit = options.limit if options.compile and blocks == BLOCKS else 0
            runs, recording = steps_of(kind, mesh, options.device, blocks, limit)
            times = milliseconds(runs, options.device)
            rows = []
            for name, time_of in times.items():
                row = [name, f"{time_of:.2f}", f"{time_of / times['by hand']:.2f}"]
                row.append(f"{recording[name]:.2f}" if name in recording else "")
                row.append(f"{guard_microseconds(runs[name]):.0f}" if name in recording else "")
                if options.device == "cuda":
                    row.append(f"{peak_bytes(runs[name]) / 2**20:.2f}")
                rows.append(row)
            for name in ("shardwise compiled", "PyTorch compiled") if limit else ():
                if name not in times:
                    rows.append([name, f"not finished in {limit} s, or failed", *[""] * (len(rows[0]) - 2)])
            header = ["", "ms", "of by hand", "recording s", "guards us"] + ["peak MiB"] * (options.device == "cuda")
            report.table(f"{kind}, {blocks} blocks", header, rows)
    report.save()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
