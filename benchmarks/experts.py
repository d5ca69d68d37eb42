"""A layer of experts that are sharded over ranks: what it moves, and how long it takes, in three ways.

    python benchmarks/experts.py [--print] [--device cuda]

The script fails if `ExpertParallel` moves other bytes than those of the routed rows and their counts.

Tokens are routed to `CHOICES` of `EXPERTS` experts. The first way is `ExpertParallel`. The second is what one writes by
hand with PyTorch's differentiable all-to-all. In the third all ranks gather the weights of all experts, and tokens
stay. Four gloo processes, one thread each; with `--device cuda` one process, which shows the cost of the local ops.
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
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd, all_to_all_single_autograd

from shardwise.debug import CommDebugMode
from shardwise.parallel import ExpertParallel, parallelize_module

DEVICE = "cuda" if "cuda" in sys.argv else "cpu"
RANKS = 1 if DEVICE == "cuda" else 4
TOKENS, WIDTH, HIDDEN = (16384, 2048, 1408) if DEVICE == "cuda" else (512, 256, 512)
EXPERTS, CHOICES = (64, 6) if DEVICE == "cuda" else (32, 2)
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32

Step = Callable[[], None]


class Experts(nn.Module):
    """Stacked weights, called with rows sorted by expert."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / HIDDEN**0.5)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        return computed(rows, counts, self.up, self.down)


def computed(rows: Tensor, counts: Tensor, up: Tensor, down: Tensor) -> Tensor:
    ends = counts.cumsum(0).int()
    return F.grouped_mm(F.silu(F.grouped_mm(rows, up, offs=ends)), down, offs=ends)


def sorted_tokens(tokens: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    order = index.flatten().argsort(stable=True)
    counts = torch.zeros(EXPERTS, dtype=torch.long, device=tokens.device)
    counts.scatter_add_(0, index.flatten(), torch.ones_like(order))
    return tokens[order // CHOICES], counts, order


def combined(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of the results of each token."""
    return (rows[order.argsort()].unflatten(0, (-1, CHOICES)) * weights.unsqueeze(-1)).sum(1)


# ---- the three ways -------------------------------------------------------------------------------------------------


def routed(experts: Experts, mesh: Any) -> tuple[Callable[..., Tensor], list[Tensor]]:
    parallelize_module(experts, mesh, ExpertParallel())

    def layer(tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        rows, counts, order = sorted_tokens(tokens, index)
        return combined(experts(rows, counts), order, weights)

    return layer, list(experts.parameters())


def by_hand(experts: Experts, mesh: Any) -> tuple[Callable[..., Tensor], list[Tensor]]:
    group, own = mesh.get_group(), EXPERTS // RANKS
    mine = slice(mesh.get_rank() * own, mesh.get_rank() * own + own)
    up, down = (nn.Parameter(w.detach()[mine].clone()) for w in experts.parameters())

    def layer(tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        rows, counts, order = sorted_tokens(tokens, index)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=group)
        table = arriving.view(RANKS, own)
        sent, received = counts.view(RANKS, own).sum(1).tolist(), table.sum(1).tolist()
        moved = all_to_all_single_autograd(rows, received, sent, group)
        source = torch.arange(own, device=tokens.device).repeat(RANKS).repeat_interleave(arriving).argsort(stable=True)
        results = computed(moved[source], table.sum(0), up, down)
        back = all_to_all_single_autograd(results[source.argsort()], sent, received, group)
        return combined(back, order, weights)

    return layer, [up, down]


def gathered(experts: Experts, mesh: Any) -> tuple[Callable[..., Tensor], list[Tensor]]:
    group, own = mesh.get_group(), EXPERTS // RANKS
    mine = slice(mesh.get_rank() * own, mesh.get_rank() * own + own)
    shards = [nn.Parameter(w.detach()[mine].clone()) for w in experts.parameters()]

    def layer(tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        rows, counts, order = sorted_tokens(tokens, index)
        up, down = (all_gather_tensor_autograd(shard, 0, group) for shard in shards)
        return combined(computed(rows, counts, up, down), order, weights)

    return layer, list(shards)


WAYS = {"ExpertParallel": routed, "all-to-all by hand": by_hand, "experts gathered": gathered}


# ---- measuring ------------------------------------------------------------------------------------------------------


def run() -> None:
    rank = dist.get_rank()
    mesh = dist.init_device_mesh(DEVICE, (RANKS,), mesh_dim_names=("ep",))
    torch.manual_seed(0)
    with torch.device(DEVICE):
        experts = [Experts().to(DTYPE) for _ in WAYS]
        for other in experts[1:]:
            other.load_state_dict(experts[0].state_dict())
        torch.manual_seed(1 + rank)
        tokens = torch.randn(TOKENS, WIDTH, dtype=DTYPE, requires_grad=True)
        weights, index = (torch.randn(TOKENS, EXPERTS) + torch.arange(EXPERTS) / EXPERTS).softmax(-1).topk(CHOICES)
    made = [make(module, mesh) for make, module in zip(WAYS.values(), experts, strict=True)]
    steps = [_step(layer, parameters, (tokens, index, weights.to(DTYPE))) for layer, parameters in made]
    with torch.no_grad():
        outputs = [layer(tokens, index, weights.to(DTYPE)) for layer, _ in made]
    for other in outputs[1:]:
        torch.testing.assert_close(other, outputs[0], rtol=2e-2, atol=2e-2)
    counts = [_counted(step) for step in steps]
    times = _milliseconds(steps)
    leaving = int((index.flatten() // (EXPERTS // RANKS) != rank).sum()) * WIDTH * DTYPE.itemsize
    _report(rank, counts, times, leaving)


def _step(layer: Callable[..., Tensor], parameters: list[Tensor], inputs: tuple[Tensor, ...]) -> Step:
    def step() -> None:
        for tensor in (*parameters, inputs[0]):
            tensor.grad = None
        layer(*inputs).sum().backward()

    return step


def _counted(step: Step) -> tuple[int, int]:
    """The number of collectives of a step, and the bytes that all ranks received from others."""
    with CommDebugMode() as comm:
        step()
    total = torch.tensor([comm.get_total_bytes()], device=DEVICE)
    dist.all_reduce(total)
    return comm.get_total_counts(), int(total)


def _milliseconds(steps: list[Step], repeats: int = 20) -> list[float]:
    best = [float("inf")] * len(steps)
    for _ in range(repeats):
        for place, step in enumerate(steps):
            dist.barrier()
            _wait()
            start = time.perf_counter()
            step()
            _wait()
            best[place] = min(best[place], time.perf_counter() - start)
    slowest = torch.tensor(best, device=DEVICE)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return [1e3 * float(seconds) for seconds in slowest]


def _wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def _report(rank: int, counts: list[tuple[int, int]], times: list[float], leaving: int) -> None:
    total = torch.tensor([leaving], device=DEVICE)
    dist.all_reduce(total)
    if rank:
        return
    # Forward and backward move each routed row twice: to its expert, and back.
    wanted = 4 * int(total)
    small = RANKS * (RANKS - 1) * (EXPERTS // RANKS) * 8
    report = Report("experts" if DEVICE == "cpu" else "experts-cuda")
    report.add(
        f"{TOKENS} tokens of {WIDTH} features on each of {RANKS} ranks, {CHOICES} of {EXPERTS} experts each, hidden "
        f"{HIDDEN}. Rows that leave their rank, forward and backward, there and back: {wanted:,} bytes."
    )
    rows = [
        [name, f"{ms:.1f}", str(number), f"{moved:,}", f"{moved - wanted:,}"]
        for name, ms, (number, moved) in zip(WAYS, times, counts, strict=True)
    ]
    report.table("A step", ["", "ms", "collectives", "bytes moved", "beyond the routed rows"], rows)
    report.add(f"The counts of rows, which ranks exchange once in a layer, are {small:,} bytes.")
    assert counts[0][1] == wanted + small, "ExpertParallel moves the routed rows and their counts"
    report.save()


def main() -> None:
    on_processes(run, RANKS, backend="nccl" if DEVICE == "cuda" else "gloo")


if __name__ == "__main__":
    sys.exit(main())
