"""The model of examples/llama.py in a small size, and its training on one device and on a mesh."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise import DeviceMesh, DTensor, P, distribute_tensor

ROWS, LENGTH, STEPS = 5, 12, 8


@functools.cache
def example() -> ModuleType:
    """The module examples/llama.py."""
    path = Path(__file__).parents[2] / "examples" / "llama.py"
    spec = importlib.util.spec_from_file_location("llama_example", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["llama_example"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def options(experts: int = 0) -> argparse.Namespace:
    return argparse.Namespace(width=16, layers=2, heads=4, kv_heads=2, length=LENGTH, experts=experts)


def new_model(experts: int = 0) -> Any:
    torch.manual_seed(0)
    return example().Llama(options(experts))


def batches(steps: int = STEPS) -> list[Tensor]:
    """Batches of 5 rows, which no axis divides."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(len(example().LETTERS), (ROWS, LENGTH + 1), generator=generator) for _ in range(steps)]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(
    model: nn.Module, place: Callable[[Tensor], Tensor], data: list[Tensor], optimizer: Any = None
) -> list[float]:
    """The losses of a training with AdamW and clipping."""
    optimizer = optimizer or new_optimizer(model)
    losses = []
    for words in data:
        loss = loss_of(model(place(words[:, :-1])), place(words[:, 1:]))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@functools.cache
def alone(experts: int = 0, steps: int = STEPS) -> tuple[list[float], dict[str, Tensor]]:
    """The losses and parameters of one device."""
    model = new_model(experts)
    losses = train(model, lambda x: x, batches(steps))
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


def place_on(mesh: DeviceMesh) -> Callable[[Tensor], Tensor]:
    """Rows over dp and ep, the sequence over cp; as far as the mesh has these axes."""
    named = mesh.mesh_dim_names or ()
    rows = tuple(axis for axis in ("dp", "ep") if axis in named)
    placements = P(rows or None, "cp" if "cp" in named else None)
    return lambda x: distribute_tensor(x, mesh, placements, src_data_rank=None)


def full(tensor: Tensor) -> Tensor:
    """The global value of a parameter, as a plain tensor."""
    found = tensor.detach()
    found = found.full_tensor() if isinstance(found, DTensor) else found
    return getattr(found, "shards", (found,))[0]


def check(model: nn.Module, mesh: DeviceMesh, experts: int = 0, steps: int = STEPS) -> None:
    """Train on a mesh, and compare losses and parameters with one device."""
    losses, expected = alone(experts, steps)
    torch.testing.assert_close(train(model, place_on(mesh), batches(steps)), losses, rtol=1e-4, atol=1e-4)
    same_parameters(model, expected)


def same_parameters(model: nn.Module, expected: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(full(parameter), expected[name], rtol=1e-4, atol=1e-4)
