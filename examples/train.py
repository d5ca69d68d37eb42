"""Train a small GPT on a mesh, and compare its loss with the same training on one device.

    python examples/train.py                              8 simulated ranks in this process, as dp x tp = 2 x 4
    torchrun --nproc-per-node 4 examples/train.py         4 processes, as 2 x 2; on GPUs if there are any

The model and its training are plain PyTorch. `PLAN` and `distribute` define how it is sharded.
"""

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise import DeviceMesh, P, distribute_module, distribute_tensor, init_device_mesh, simulate
from shardwise.debug import CommDebugMode, draw
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

TEXT = (Path(__file__).parent / "sonnets.txt").read_text()  # Shakespeare, 1609
LETTERS = sorted(set(TEXT))  # 57 of them, which 4 does not divide: shards are uneven


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, nn.Dropout(dropout)
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention_norm(x)
        q, k, v = (project(y).unflatten(-1, (self.heads, -1)) for project in (self.query, self.key, self.value))
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(mixed))
        return x + self.dropout(self.down(F.gelu(self.up(self.mlp_norm(x)))))


class GPT(nn.Module):
    def __init__(
        self, width: int = 64, heads: int = 4, layers: int = 2, length: int = 48, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.length = length
        self.letters = nn.Embedding(len(LETTERS), width)
        self.position = nn.Parameter(0.1 * torch.randn(length, width))
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(LETTERS))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.letters(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


colwise = ColwiseParallel(use_local_output=False)  # each rank computes some of the output features
rowwise = RowwiseParallel(use_local_output=False)  # each rank reads some of the input features; results are summed
PLAN = {
    "letters": rowwise,
    "blocks.*.query": colwise,
    "blocks.*.key": colwise,
    "blocks.*.value": colwise,
    "blocks.*.out": rowwise,
    "blocks.*.up": colwise,
    "blocks.*.down": rowwise,
    "head": colwise,
}


def distribute(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard the parameters that the plan names over tp; replicate all others, and replicate all of them over dp."""
    parallelize_module(model, mesh, PLAN)
    return distribute_module(model, mesh)


def batches(steps: int, rows: int, length: int, device: str = "cpu") -> list[tuple[Tensor, Tensor]]:
    """Return batches of inputs and targets: rows of the text, and the same rows shifted by one letter."""
    numbers = torch.tensor([LETTERS.index(letter) for letter in TEXT], device=device)
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(steps):
        starts = torch.randint(len(TEXT) - length, (rows,), generator=generator).tolist()
        found.append(tuple(torch.stack([numbers[s + by : s + by + length] for s in starts]) for by in (0, 1)))
    return found


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, targets: Tensor) -> Tensor:
    loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def train(
    model: nn.Module, data: list[tuple[Tensor, Tensor]], place: Callable[[Tensor], Tensor] = lambda x: x, bar: str = ""
) -> list[float]:
    """Train, and return the loss of every step. `place` distributes the tensors of a batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses: list[float] = []
    for tokens, targets in data:
        losses.append(train_step(model, optimizer, place(tokens), place(targets)).item())
        progress(bar, len(losses), len(data), losses[-1])
    return losses


def progress(title: str, step: int, steps: int, loss: float) -> None:
    done = 30 * step // steps
    if title and is_first_rank() and (step == steps or sys.stdout.isatty()):
        bar = f"{'━' * done}{'╌' * (30 - done)} {step:3}/{steps}  loss {loss:.4f}"
        print(f"\r{title} {bar}", end="\n" if step == steps else "", flush=True)


def is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def compare(alone: list[float], shared: list[float]) -> str:
    """Return a table of the losses of both trainings."""
    shown = sorted({*range(0, len(alone), max(len(alone) // 8, 1)), len(alone) - 1})
    rows = [(step + 1, alone[step], shared[step], abs(alone[step] - shared[step])) for step in shown]
    lines = [f"{step:6} {one:14.6f} {other:10.6f} {apart:11.1e}" for step, one, other, apart in rows]
    largest = max(abs(one - other) for one, other in zip(alone, shared, strict=True))
    last = f"the largest difference in {len(alone)} steps is {largest:.1e}"
    return "\n".join(["  step     one device    sharded  difference", *lines, last])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", type=int, default=8, metavar="RANKS", help="simulated ranks, without torchrun")
    parser.add_argument("--tp", type=int, help="size of the tp axis; by default 4 of 8 ranks, 2 of 4")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rows", type=int, default=8, help="batch size")
    parser.add_argument("--dropout", type=float, default=0.0, help="with dropout the losses differ: the masks do")
    options = parser.parse_args()
    processes = int(os.environ.get("WORLD_SIZE", 0))
    torch.set_num_threads(1)  # shards are small, and ranks on one machine share its cores
    with contextlib.nullcontext() if processes else simulate(options.simulate):
        run(options, processes or options.simulate)
    if dist.is_initialized():
        dist.destroy_process_group()


def run(options: argparse.Namespace, ranks: int) -> None:
    tp = options.tp or next(n for n in (4, 2, 1) if ranks % n == 0 and n * n <= 2 * ranks)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (ranks // tp, tp), mesh_dim_names=("dp", "tp"))
    say = print if is_first_rank() else lambda *_: None

    def new_model() -> GPT:
        torch.manual_seed(0)
        return GPT(dropout=options.dropout).to(device)

    reference, model = new_model(), distribute(new_model(), mesh)
    data = batches(options.steps, options.rows, model.length, device)

    def place(x: Tensor) -> Tensor:
        return distribute_tensor(x, mesh, P("dp"))

    size = sum(p.numel() for p in reference.parameters())
    say(f"{size:,} parameters, {ranks} ranks as dp x tp = {ranks // tp} x {tp}\n")
    say(f"{draw(model)}\n")
    start = time.perf_counter()
    alone = train(reference, data, bar="one device")
    shared = train(model, data, place, bar="sharded   ")
    say(f"\n{compare(alone, shared)}; both took {time.perf_counter() - start:.1f} s\n")

    tokens, targets = (place(x) for x in data[0])
    optimizer = torch.optim.AdamW(model.parameters())
    with CommDebugMode() as comm:
        train_step(model, optimizer, tokens, targets)
    say(f"one step: {comm.get_total_counts()} collectives; each rank receives {comm.get_total_bytes():,} bytes")
    say(comm.generate_comm_debug_tracing_table(noise_level=0))


if __name__ == "__main__":
    main()
