"""Train a Llama-like model on a mesh of ep x cp x dp x tp, with a table of what each rank holds and communicates.

    python examples/llama.py --simulate 8 --dp 2 --cp 2 --tp 2 --compare           simulated ranks in this process
    python examples/llama.py --simulate 8 --dp 2 --ep 2 --tp 2 --experts 4         a mixture of experts
    torchrun --nproc-per-node 4 examples/llama.py --dp 2 --tp 2                    processes; on GPUs if there are any
    python examples/llama.py --dp 8 --checkpoint folder                            saves there, and resumes from there

    ep  shards rows of a batch, and experts: tokens travel to the ranks of their experts
    cp  shards the sequence: attention passes keys and values around
    dp  shards rows of a batch, and parameters: fully_shard gathers those of a block while it runs
    tp  shards features of linear layers, and heads of attention

The model and the training step are plain PyTorch. `parallelize` and `place` define what runs where.
"""

import argparse
import contextlib
import math
import os
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from shardwise import DeviceMesh, DTensor, P, distribute_module, distribute_tensor, init_device_mesh, simulate
from shardwise.debug import CommDebugMode
from shardwise.fsdp import fully_shard
from shardwise.parallel import ColwiseParallel, ExpertParallel, RowwiseParallel, parallelize_module

TEXT = (Path(__file__).parent / "sonnets.txt").read_text()  # Shakespeare, 1609
LETTERS = sorted(set(TEXT))
AXES = ("ep", "cp", "dp", "tp")

# ---- the model -------------------------------------------------------------------------------------------------------


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of features of every head by an angle that grows with the position."""
    one, other = x.chunk(2, -1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, length: int) -> None:
        super().__init__()
        self.size = width // heads
        self.query, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.key, self.value = (nn.Linear(width, kv_heads * self.size, bias=False) for _ in range(2))
        angles = torch.outer(torch.arange(length), 10000.0 ** (-torch.arange(0, self.size, 2) / self.size))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (project(x).unflatten(-1, (-1, self.size)) for project in (self.query, self.key, self.value))
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
        q, k = (rotated(heads, self.cos, self.sin) for heads in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """SwiGLU networks, stacked. Each token goes through those that `index` names."""

    def __init__(self, count: int, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(count, hidden, width) / width**0.5)
        self.up = nn.Parameter(torch.randn(count, hidden, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(count, width, hidden) / hidden**0.5)

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        chosen, order = index.flatten().sort(stable=True)
        ends = F.one_hot(chosen, len(self.gate)).sum(0).cumsum(0).int()
        rows = x.flatten(0, -2)[order // index.shape[-1]]
        gate = F.silu(F.grouped_mm(rows, self.gate.transpose(1, 2), offs=ends))
        rows = gate * F.grouped_mm(rows, self.up.transpose(1, 2), offs=ends)
        rows = F.grouped_mm(rows, self.down.transpose(1, 2), offs=ends)
        return (rows[order.argsort()] * weights.reshape(-1, 1)).unflatten(0, index.shape).sum(-2)


class Mixture(nn.Module):
    def __init__(self, count: int, choices: int, width: int, hidden: int) -> None:
        super().__init__()
        self.choices, self.router = choices, nn.Linear(width, count, bias=False)
        self.experts = Experts(count, width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.router(x).softmax(-1).topk(self.choices, -1)
        return self.experts(x, index, weights / weights.sum(-1, keepdim=True))


class Block(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        width, hidden = options.width, 2 * options.width
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, options.heads, options.kv_heads, options.length)
        self.mlp = Mixture(options.experts, 2, width, hidden) if options.experts else SwiGLU(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(LETTERS), options.width)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.layers))
        self.norm, self.head = nn.RMSNorm(options.width), nn.Linear(options.width, len(LETTERS), bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.letters(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# ---- what runs where -------------------------------------------------------------------------------------------------

colwise = ColwiseParallel(use_local_output=False)  # each rank computes some of the output features
rowwise = RowwiseParallel(use_local_output=False)  # each rank reads some of the input features; results are summed
PLAN = {
    "letters": rowwise,
    "blocks.*.attention.query": colwise,
    "blocks.*.attention.key": colwise,
    "blocks.*.attention.value": colwise,
    "blocks.*.attention.out": rowwise,
    "head": colwise,
}
DENSE = {"blocks.*.mlp.gate": colwise, "blocks.*.mlp.up": colwise, "blocks.*.mlp.down": rowwise}
SPARSE = {"blocks.*.mlp.experts": ExpertParallel()}  # over the axis ep


def parallelize(model: Llama, mesh: DeviceMesh, options: argparse.Namespace) -> Llama:
    """Shard features over tp, experts over ep, and all parameters over dp; gradients are summed over cp and dp."""
    parallelize_module(model, mesh, PLAN | (SPARSE if options.experts else DENSE))
    distribute_module(model, mesh)  # what the plan does not name is replicated
    for block in model.blocks:
        fully_shard(block, mesh=mesh["cp", "dp"])
    return fully_shard(model, mesh=mesh["cp", "dp"])


def place(x: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """Shard rows over dp and ep, and the sequence over cp."""
    return x if mesh is None else distribute_tensor(x, mesh, P(("dp", "ep"), "cp"), src_data_rank=None)


# ---- training --------------------------------------------------------------------------------------------------------


class Trainer:
    """A model, its optimizer and learning rates; on a mesh, or on one device."""

    def __init__(self, options: argparse.Namespace, device: str, mesh: DeviceMesh | None = None) -> None:
        torch.manual_seed(0)
        self.options, self.mesh, self.done = options, mesh, 0
        self.model = Llama(options).to(device)
        if mesh is not None:
            self.model = parallelize(self.model, mesh, options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=options.lr, weight_decay=0.1)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.rate)

    def rate(self, step: int) -> float:
        """The factor of the learning rate: a linear warm-up, then half a cosine."""
        warm = max(self.options.steps // 10, 1)
        left = (step - warm) / max(self.options.steps - warm, 1)
        return (step + 1) / warm if step < warm else 0.5 + 0.5 * math.cos(math.pi * left)

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(place(tokens, self.mesh))
        loss = F.cross_entropy(logits.flatten(0, 1), place(targets, self.mesh).flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.done += 1
        return loss.detach()

    def run(self, data: list[tuple[Tensor, Tensor]], title: str) -> list[float]:
        """Train on what is left of the data, and return the losses."""
        losses: list[float] = []
        steps = self.options.stop or len(data)
        for tokens, targets in data[self.done : steps]:
            losses.append(self.step(tokens, targets).item())
            progress(title, self.done, steps, losses[-1])
        return losses

    def save(self, folder: str) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer, "schedule": self.schedule.state_dict(), "done": self.done}
        dcp.save(state, checkpoint_id=Path(folder, f"step-{self.done:06}"), no_dist=not processes())

    def load(self, folder: str) -> None:
        """Load the last step that was saved, on any mesh; nothing if there is none."""
        steps = sorted(Path(folder).glob("step-*"))
        if not steps:
            return
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer, "schedule": self.schedule.state_dict(), "done": 0}
        dcp.load(state, checkpoint_id=steps[-1], no_dist=not processes())
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        self.schedule.load_state_dict(state["schedule"])
        self.done = state["done"]


def batches(options: argparse.Namespace, device: str) -> list[tuple[Tensor, Tensor]]:
    """Return batches of inputs and targets: rows of the text, and the same rows shifted by one letter."""
    numbers = torch.tensor([LETTERS.index(letter) for letter in TEXT], device=device)
    generator, length = torch.Generator().manual_seed(1), options.length
    found = []
    for _ in range(options.steps):
        starts = torch.randint(len(TEXT) - length, (options.rows,), generator=generator).tolist()
        found.append(tuple(torch.stack([numbers[s + by : s + by + length] for s in starts]) for by in (0, 1)))
    return found


# ---- what is printed -------------------------------------------------------------------------------------------------


def progress(title: str, step: int, steps: int, loss: float) -> None:
    done = 30 * step // steps
    if is_first_rank() and (step == steps or sys.stdout.isatty()):
        bar = f"{'━' * done}{'╌' * (30 - done)} {step:3}/{steps}  loss {loss:.4f}"
        print(f"\r{title} {bar}", end="\n" if step == steps else "", flush=True)


def report(trainer: Trainer, batch: tuple[Tensor, Tensor]) -> str:
    """Return a table of the memory that a rank needs, and of the collectives of one step by mesh axis."""

    def held(tensors: list[Tensor]) -> int:
        """Bytes on the rank that holds most."""
        return sum(max(s.nbytes for s in t.shards.values()) if isinstance(t, DTensor) else t.nbytes for t in tensors)

    parameters = list(trainer.model.parameters())
    states = [value for state in trainer.optimizer.state.values() for value in state.values()]
    rows = [("parameters", parameters), ("gradients", parameters), ("optimizer", [s for s in states if s.dim()])]
    lines = [f"  {'':12} {'one device':>14} {'a rank':>14}"]
    lines += [f"  {name:12} {sum(t.nbytes for t in of):>14,} {held(of):>14,}" for name, of in rows]
    with CommDebugMode() as comm:
        trainer.step(*batch)
    calls, received = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for collective in comm.collectives:
        calls[collective.over, collective.kind] += 1
        received[collective.over, collective.kind] += collective.received
    lines += ["", f"  {'over':16} {'collective':>14} {'a step':>8} {'bytes received':>16}"]
    moved = sorted(over for over in calls if received[over])  # axes of size 1 move nothing
    lines += [f"  {over[0]:16} {over[1]:>14} {calls[over]:8} {received[over]:16,}" for over in moved]
    return "\n".join(lines)


def processes() -> int:
    return int(os.environ.get("WORLD_SIZE", 0))


def is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


# ---- the program -----------------------------------------------------------------------------------------------------


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", type=int, default=8, metavar="RANKS", help="simulated ranks, without torchrun")
    for axis in AXES:
        parser.add_argument(f"--{axis}", type=int, default=0 if axis == "dp" else 1, help="its size; dp: what is left")
    for name, default in {"width": 32, "layers": 2, "heads": 4, "kv-heads": 2, "experts": 0, "length": 24}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rows", type=int, default=6, help="batch size; dp x ep need not divide it")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--stop", type=int, metavar="STEP", help="stop after this step, to be resumed")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--checkpoint", help="resume from this folder if it is there, and save to it at the end")
    parser.add_argument("--compare", action="store_true", help="train on one device, too, and compare the losses")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace, ranks: int) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options.dp = options.dp or ranks // (options.ep * options.cp * options.tp)
    sizes = tuple(getattr(options, axis) for axis in AXES)
    mesh = init_device_mesh(device, sizes, mesh_dim_names=AXES)
    say = print if is_first_rank() else lambda *_: None
    data = batches(options, device)
    trainer = Trainer(options, device, mesh)
    count = sum(parameter.numel() for parameter in trainer.model.parameters())
    say(f"{count:,} parameters, {ranks} ranks as {' x '.join(AXES)} = {' x '.join(map(str, sizes))}")
    if options.checkpoint:
        trainer.load(options.checkpoint)
        say(f"resumed after step {trainer.done}")
    start = time.perf_counter()
    losses = trainer.run(data, "sharded   ")
    say(f"{time.perf_counter() - start:.1f} s")
    if options.checkpoint and losses:
        trainer.save(options.checkpoint)
    if options.compare:
        alone = Trainer(options, device).run(data, "one device")
        alone = alone[len(alone) - len(losses) :]  # those of the steps that were not resumed from
        apart = max((abs(one - other) for one, other in zip(alone, losses, strict=True)), default=0.0)
        say(f"the largest difference of a loss in {len(losses)} steps is {apart:.1e}")
    say(f"\n{report(trainer, data[0])}")


def main() -> None:
    options = parse()
    torch.set_num_threads(1)  # shards are small, and ranks on one machine share its cores
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # simulated ranks save as one
    with contextlib.nullcontext() if processes() else simulate(options.simulate):
        run(options, processes() or options.simulate)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
