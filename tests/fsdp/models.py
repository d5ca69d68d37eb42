"""A small transformer-like model, its training on one device and under fully_shard."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise import DTensor, RankTensor
from shardwise.fsdp import fully_shard

VOCABULARY = 37  # uneven over any number of ranks
BATCH = 13


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 3 * dim)
        self.down = nn.Linear(3 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """An embedding tied to the output layer, and blocks."""

    def __init__(self, dim: int = 16, blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(blocks))
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def new_model(**options: Any) -> Model:
    torch.manual_seed(0)
    return Model(**options)


def batches(steps: int, rows: int = BATCH) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCABULARY, (rows, 5), generator=generator) for _ in range(steps)]


def shard(model: Model, mesh: DeviceMesh | None = None, **options: Any) -> Model:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def train(model: nn.Module, inputs: Callable[[Tensor], Tensor], steps: int = 8, rows: int = BATCH) -> list[Tensor]:
    """Train with AdamW and clipping. Returns the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for tokens in batches(steps, rows):
        loss = loss_of(model, inputs(tokens))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def on_one_device(rows: int = BATCH, **options: Any) -> tuple[Model, list[Tensor]]:
    model = new_model(**options)
    return model, train(model, lambda tokens: tokens, rows=rows)


def full(tensor: Tensor) -> Tensor:
    """The value of a tensor, which is the same on all ranks."""
    tensor = tensor.detach()
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    if isinstance(tensor, RankTensor):
        assert all(torch.equal(shard, tensor.shards[0]) for shard in tensor.shards)
        return tensor.shards[0]
    return tensor


def assert_same_parameters(model: nn.Module, expected: nn.Module, **tolerance: float) -> None:
    tolerance = tolerance or {"atol": 1e-4, "rtol": 1e-4}
    wanted = dict(expected.named_parameters())
    found = dict(model.named_parameters())
    assert found.keys() == wanted.keys()
    for name, parameter in found.items():
        torch.testing.assert_close(full(parameter), wanted[name].detach(), **tolerance)


def clone(model: Model) -> Model:
    return copy.deepcopy(model)
