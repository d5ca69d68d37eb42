"""The training step that `eager.py` times: 4 transformer blocks, plain, or tensor and sequence parallel."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIM, HEADS, HIDDEN, BLOCKS = 64, 8, 128, 4
BATCH, LENGTH = 4, 32

Step = Callable[[], None]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, length = x.shape[:2]

        def heads(values: Tensor) -> Tensor:  # as many as there are here: a local output has a shard of them
            return values.view(batch, length, -1, DIM // HEADS).transpose(1, 2)

        y = F.scaled_dot_product_attention(heads(self.q(x)), heads(self.k(x)), heads(self.v(x)), is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, -1))


class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(DIM, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.attention, self.mlp = Attention(), SwiGLU()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


def plan(library: str, local: bool) -> dict[str, Any]:
    """Tensor and sequence parallel: between the halves of a block the sequence is sharded, inside them the features."""
    lib, styles = importlib.import_module(library), importlib.import_module(f"{library}.parallel")
    sharded, replicated = lib.Shard(1), lib.Replicate()
    column = styles.ColwiseParallel(use_local_output=local)
    row = styles.RowwiseParallel(output_layouts=sharded, use_local_output=local)
    gather = styles.PrepareModuleInput(input_layouts=(sharded,), desired_input_layouts=(replicated,))
    return {
        "*.norm_1": styles.SequenceParallel(),
        "*.norm_2": styles.SequenceParallel(),
        "*.attention": gather,
        **{f"*.attention.{name}": column for name in "qkv"},
        "*.attention.out": row,
        "*.mlp": gather,
        **{f"*.mlp.{name}": column for name in ("gate", "up")},
        "*.mlp.down": row,
    }


def step(model: nn.Module, x: Tensor, compiled: bool = False) -> Step:
    """Forward, backward and AdamW; `compiled`: forward and backward by torch.compile."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    forward = torch.compile(model) if compiled else model

    def run() -> None:
        optimizer.zero_grad()
        forward(x).square().mean().backward()
        optimizer.step()

    return run


def plain(device: str) -> Step:
    return step(_blocks(device), torch.randn(BATCH, LENGTH, DIM, device=device))


def local_outputs(library: str, mesh: Any, device: str) -> Step:
    """Between modules the tensors are plain: each rank's local shard of the sequence."""
    styles = importlib.import_module(f"{library}.parallel")
    model = styles.parallelize_module(_blocks(device), mesh, plan(library, local=True))
    return step(model, torch.randn(BATCH, LENGTH // mesh.size(), DIM, device=device))


def all_distributed(library: str, mesh: Any, device: str, blocks: int = BLOCKS, compiled: bool = False) -> Step:
    """Every tensor is distributed, from the input to the loss."""
    lib, styles = importlib.import_module(library), importlib.import_module(f"{library}.parallel")
    model = styles.parallelize_module(_blocks(device, blocks), mesh, plan(library, local=False))
    x = lib.distribute_tensor(torch.randn(BATCH, LENGTH, DIM, device=device), mesh, [lib.Shard(1)])
    return step(model, x, compiled)


def _blocks(device: str, blocks: int = BLOCKS) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(blocks))).to(device)


def milliseconds(steps: dict[str, Step], device: str, number: int = 5, repeats: int = 12) -> dict[str, float]:
    """The time of each step: the best mean of several runs. They take turns, to meet the same disturbances."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    best = dict.fromkeys(steps, float("inf"))
    for repeat in range(1 + repeats):
        for name, run in steps.items():
            wait()
            start = time.perf_counter()
            for _ in range(number):
                run()
            wait()
            if repeat:  # the first is for warming up
                best[name] = min(best[name], (time.perf_counter() - start) / number * 1e3)
    return best
