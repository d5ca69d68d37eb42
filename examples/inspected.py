"""The trainings of train.py and llama.py, for tools: is it right, and what does a step communicate?

shardwise verify examples/inspected.py:check                            compares it with one device
shardwise report examples/inspected.py:one_step --mesh dp=2,tp=4        writes a page about one training step
shardwise explain examples/inspected.py:run_one_step --mesh dp=2,tp=4   says why each collective runs
"""

from collections.abc import Callable

import llama
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from train import GPT, batches, distribute, train_step

from shardwise import P, distribute_tensor


def one_step(mesh: DeviceMesh) -> Callable[[], Tensor]:
    """Return a training step on a mesh with axes dp and tp, for `shardwise report`."""
    model = distribute(GPT(width=128, heads=8, layers=4).to(mesh.device_type), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batch = batches(1, 8, 48, mesh.device_type)[0]
    tokens, targets = (distribute_tensor(x, mesh, P("dp")) for x in batch)
    return lambda: train_step(model, optimizer, tokens, targets)


def run_one_step(mesh: DeviceMesh) -> Tensor:
    """Make a training step, and run it."""
    return one_step(mesh)()


def check() -> dict[str, object]:
    """Return arguments of `shardwise.verify`, for `python -m shardwise verify examples/inspected.py:check`."""

    def step(model: nn.Module, batch: tuple[Tensor, Tensor], mesh: object, optimizer: torch.optim.Optimizer) -> Tensor:
        return train_step(model, optimizer, *batch)

    return {
        "build_model": lambda: GPT(width=16, length=12, dropout=0.1),
        "apply": distribute,
        "batch": lambda step: batches(step + 1, 5, 12)[step],
        "step": step,
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        "place": P("dp"),
        "mesh": (2, 4),
        "names": ("dp", "tp"),
        "steps": 2,
    }


def check_llama(experts: int = 0) -> dict[str, object]:
    """Return arguments of `shardwise.verify`, for `python -m shardwise verify examples/inspected.py:check_llama`."""
    options = llama.parse(["--width", "16", "--length", "8", "--rows", "5", "--experts", str(experts), "--steps", "2"])

    def step(
        model: llama.Llama, batch: tuple[Tensor, Tensor], mesh: object, optimizer: torch.optim.Optimizer
    ) -> Tensor:
        loss = F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return {
        "build_model": lambda: llama.Llama(options),
        "apply": lambda model, mesh: llama.parallelize(model, mesh, options),
        "batch": lambda step: llama.batches(options, "cpu")[step],
        "step": step,
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=options.lr, weight_decay=0.1),
        "place": lambda batch, mesh: tuple(llama.place(x, mesh) for x in batch),
        "mesh": (2, 1, 2, 2) if experts else (1, 2, 2, 2),
        "names": llama.AXES,
        "steps": 2,
    }


def check_experts() -> dict[str, object]:
    """The same with a mixture of experts."""
    return check_llama(experts=4)
