"""A data-parallel training step: gradients reduced in buckets and one by one, next to DistributedDataParallel.

    python benchmarks/data_parallel.py [--print] [--device cuda]

Four processes, one thread each: gloo, or with `--device cuda` NCCL on as many GPUs as there are, which must be two or
more: `DistributedDataParallel` does not run on a fake process group.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from launch import on_processes
from report import Report
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from training import BLOCKS, DIM, Block, milliseconds

from shardwise import P, bucket_gradients, distribute_module, distribute_tensor, replicate
from shardwise.debug import CommDebugMode

DEVICE = "cuda" if "cuda" in sys.argv else "cpu"
RANKS = 4 if DEVICE == "cpu" else torch.cuda.device_count()
ROWS, LENGTH = 8, 32
WIDE = 1024


def small() -> nn.Module:
    """Transformer blocks of 64 features: 38 parameters, most of them of a few KiB."""
    return nn.Sequential(*(Block() for _ in range(BLOCKS)), nn.Linear(DIM, DIM))


def large() -> nn.Module:
    """Eight layers of 4 MiB each, more than one bucket."""
    return nn.Sequential(nn.Linear(DIM, WIDE), *(nn.Linear(WIDE, WIDE) for _ in range(8)), nn.Linear(WIDE, DIM))


MODELS: dict[str, Callable[[], nn.Module]] = {"4 small blocks": small, "8 large layers": large}


def steps(make: Callable[[], nn.Module], mesh: Any) -> dict[str, Callable[[], None]]:
    """A step of the same training in each way."""
    torch.manual_seed(0)
    model = make().to(DEVICE)
    batch = torch.randn(ROWS * RANKS, LENGTH, DIM, device=DEVICE)
    sharded = distribute_tensor(batch, mesh, P("dp"), src_data_rank=None)
    local = sharded.to_local().clone()
    distributed = distribute_module(copy.deepcopy(model), mesh)
    replicas = replicate(copy.deepcopy(model), mesh=mesh)
    wrapped = DistributedDataParallel(copy.deepcopy(model), gradient_as_bucket_view=True)

    def step_of(module: nn.Module, inputs: Tensor, size: str | None = "25 MiB") -> Callable[[], None]:
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-3, foreach=True)

        def step() -> None:
            with bucket_gradients(size):
                module(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return {
        "distribute_module, one by one": step_of(distributed, sharded, None),
        "distribute_module": step_of(distributed, sharded),
        "replicate, local batches, one by one": step_of(replicas, local, None),
        "replicate, local batches": step_of(replicas, local),
        "DistributedDataParallel": step_of(wrapped, local),
    }


def reductions(step: Callable[[], None]) -> str:
    """How many collectives the backward pass takes."""
    with CommDebugMode() as comm:
        step()
    return str(sum(c.moment.backward for c in comm.collectives))


def run() -> None:
    if DEVICE == "cuda":
        torch.cuda.set_device(dist.get_rank())
    mesh = dist.init_device_mesh(DEVICE, (dist.get_world_size(),), mesh_dim_names=("dp",))
    report = Report("data-parallel" if DEVICE == "cpu" else "data-parallel-cuda") if dist.get_rank() == 0 else None
    for name, make in MODELS.items():
        ways = steps(make, mesh)
        counts = [reductions(step) for step in ways.values()]
        times = milliseconds(ways, DEVICE, number=2, repeats=6)
        theirs = times["DistributedDataParallel"]
        rows = [
            [way, f"{time:.2f}", f"{time / theirs:.2f}", count]
            for (way, time), count in zip(times.items(), counts, strict=True)
        ]
        if report is not None:
            report.table(f"A step, {name}", ["", "ms", "ratio", "collectives"], rows)
    if report is not None:
        report.save()


def main() -> None:
    if RANKS < 2:
        raise SystemExit("benchmarks/data_parallel.py --device cuda needs two GPUs or more")
    on_processes(run, RANKS, backend="gloo" if DEVICE == "cpu" else "nccl")


if __name__ == "__main__":
    sys.exit(main())
