"""A training step under fully_shard: shardwise beside PyTorch, its time, collectives, and copies around them.

    python benchmarks/fsdp.py [--print]                   # 4 gloo processes, then one process of a fake group
    python benchmarks/fsdp.py --device cuda [--print]     # one process of a fake group, on a GPU

On the fake group nothing is sent, so the times there are those of the library and of its copies. Both libraries train
copies of one model in the same processes, with a local batch each, and take turns.
"""

from __future__ import annotations

import copy
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from launch import on_processes
from report import Report
from torch import Tensor, nn
from torch.distributed import fsdp as theirs
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise.fsdp as ours

RANKS = 4
FAKE_RANKS = 8
VOCABULARY = 4096
COPIES = ("copy", "clone", "cat", "split_with_sizes")
"""Parts of the names of ops that move data from one place of a device to another."""


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (8, -1)).transpose(1, 2) for t in self.qkv(self.first(x)).chunk(3, dim=-1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Model(nn.Module):
    def __init__(self, dim: int, blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(blocks))
        self.head = nn.Linear(dim, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class Ops(TorchDispatchMode):
    """Counts collectives, and ops that copy. Those of the model itself are counted as well."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: Counter[str] = Counter()
        self.copies = 0
        self.copied = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # what a tensor subclass does with its local tensors is counted
        result = func(*args, **(kwargs or {}))
        space, name = func._schema.name.split("::")
        if space in ("c10d", "_c10d_functional"):
            if "wait" not in name:
                self.collectives[name.strip("_")] += 1
        elif any(part in name for part in COPIES) and "slice" not in name:
            self.copies += 1
            self.copied += _bytes(args)
        return result


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(map(_bytes, value)) if isinstance(value, (list, tuple)) else 0


def shard(library: Any, model: Model, mesh: Any) -> Model:
    for block in model.blocks:
        library.fully_shard(block, mesh=mesh)
    return library.fully_shard(model, mesh=mesh)


def step_of(model: Model, tokens: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def seconds(steps: list[Callable[[], None]], device: str, repeats: int) -> list[float]:
    """The median time of each step; they take turns."""
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(repeats):
        for step, found in zip(steps, times, strict=True):
            if dist.get_backend() != "fake":
                dist.barrier()
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            step()
            if device == "cuda":
                torch.cuda.synchronize()
            found.append(time.perf_counter() - start)
    return [sorted(found)[len(found) // 2] for found in times]


def rows_of(device: str, dim: int, blocks: int, tokens: tuple[int, int], repeats: int) -> list[list[str]]:
    torch.manual_seed(0)
    model = Model(dim, blocks).to(device)
    data = torch.randint(0, VOCABULARY, tokens, device=device)
    plain = copy.deepcopy(model)
    mesh = dist.init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("dp",))
    both = [shard(ours, copy.deepcopy(model), mesh), shard(theirs, model, mesh)]
    steps = [step_of(each, data) for each in both]
    for step in steps * 3:
        step()
    with Ops() as of_model:
        step_of(plain, data)()
    counted = []
    for step in steps:
        with Ops() as ops:
            step()
        counted.append(ops)
    times = seconds(steps, device, repeats)
    rows = []
    for name, ops, each in zip(("shardwise", "PyTorch"), counted, times, strict=True):
        copies = (ops.copies - of_model.copies) / (blocks + 1)
        copied = (ops.copied - of_model.copied) / 2**20
        calls = sum(ops.collectives.values()) / (blocks + 1)
        rows.append(
            [name, f"{each * 1e3:.1f}", f"{each / times[1]:.2f}", f"{calls:.1f}", f"{copies:.1f}", f"{copied:.0f}"]
        )
    return rows


HEADER = ["", "ms", "of PyTorch's", "collectives a group", "copies a group", "copied MiB"]


def on_fake_group(device: str) -> list[list[str]]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=FAKE_RANKS, store=FakeStore())
    if device == "cuda":
        rows = rows_of(device, 1024, 16, (4, 256), repeats=30)
    else:
        rows = rows_of(device, 256, 4, (2, 32), repeats=30)
    dist.destroy_process_group()
    return rows


def main() -> None:
    warnings.simplefilter("ignore")
    device = sys.argv[sys.argv.index("--device") + 1] if "--device" in sys.argv else "cpu"
    torch.set_num_threads(1)
    report = Report("fsdp" if device == "cpu" else f"fsdp-{device}")
    if device == "cpu":
        rows = on_processes(rows_of, RANKS, "cpu", 512, 4, (2, 32), 15)
        report.table(f"{RANKS} gloo processes, 4 blocks of 3.2 million parameters", HEADER, rows)
    title = f"Rank 0 of {FAKE_RANKS} of a fake group, {device}"
    report.table(title, HEADER, on_fake_group(device))
    report.save()


if __name__ == "__main__":
    main()
