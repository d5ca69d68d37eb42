"""Functions of distributed tensors, and their arguments, that are compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import DTensor, P, Partial, Replicate, Shard, distribute_module, distribute_tensor, local_map
from shardwise.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

Case = tuple[Callable[..., Tensor], list[Tensor]]


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(8), MLP()

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.norm(x))


class Make:
    """Makes arguments on one mesh."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def __call__(self, *shape: int, on: Any = None) -> DTensor:
        return self.of(torch.randn(*shape), on or Shard(0)).requires_grad_()

    def of(self, tensor: Tensor, placement: Any) -> DTensor:
        return distribute_tensor(tensor, self.mesh, [placement], src_data_rank=None)

    def indices(self, *shape: int, on: Any = None) -> DTensor:
        return self.of(torch.randint(0, 16, shape), on or Shard(0))

    def shard(self, name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, value in list(module._parameters.items()):
            if value is not None:
                setattr(module, key, nn.Parameter(self.of(value.data, Shard(0))))


CASES: dict[str, Callable[[Make], Case]] = {}


def case(make: Callable[[Make], Case]) -> None:
    CASES[make.__name__] = make


@case
def ops(d: Make) -> Case:
    return lambda x, y: x * 2 + y.sin(), [d(8, 4), d(8, 4)]


@case
def products(d: Make) -> Case:
    return lambda x, y: (x @ y).relu() @ y.t(), [d(8, 4, on=Replicate()), d(4, 12, on=Shard(1))]


@case
def redistribute(d: Make) -> Case:
    mesh = d.mesh
    return lambda x: (x * 2).redistribute(mesh, [Replicate()]).redistribute(placements=P(None, "tp")) * 3, [d(8, 4)]


@case
def to_local(d: Make) -> Case:
    return lambda x: x.to_local() * 2, [d(8, 4)]


@case
def full_tensor(d: Make) -> Case:
    return lambda x: x.full_tensor() * 2, [d(8, 4)]


@case
def from_local(d: Make) -> Case:
    mesh = d.mesh
    return lambda x: DTensor.from_local(x, mesh, [Shard(0)]).redistribute(placements=[Replicate()]) * 2, [
        torch.randn(4, 4, requires_grad=True)
    ]


@case
def placements(d: Make) -> Case:
    def function(x: DTensor) -> Tensor:
        y = x.sum(0)
        if x.placements[0].is_shard(0) and x.device_mesh.ndim == 1 and y.placements == (Partial(),):
            return y.redistribute(x.device_mesh, [Replicate()]) * x.placements[0].dim
        return y

    return function, [d(8, 4)]


@case
def distribute(d: Make) -> Case:
    mesh = d.mesh
    return lambda x: distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None) * 2, [torch.randn(8, 4)]


@case
def factories(d: Make) -> Case:
    mesh = d.mesh

    def function(x: DTensor) -> Tensor:
        options: dict[str, Any] = {"device_mesh": mesh, "placements": [Shard(0)]}
        made = shardwise.zeros(8, 4, **options) + shardwise.full((8, 4), 3.0, **options)
        return x * shardwise.ones(8, 4, **options) + made * shardwise.randn(8, 4, **options)

    return function, [d(8, 4)]


@case
def replicated_module(d: Make) -> Case:
    return distribute_module(MLP(), d.mesh), [d(4, 8, on=Replicate())]


@case
def sharded_module(d: Make) -> Case:
    return distribute_module(MLP(), d.mesh, d.shard), [d(4, 8)]


@case
def styles_with_local_outputs(d: Make) -> Case:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(MLP(), d.mesh, plan), [torch.randn(4, 8, requires_grad=True)]


@case
def styles_with_distributed_outputs(d: Make) -> Case:
    plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel(use_local_output=False)}
    return parallelize_module(MLP(), d.mesh, plan), [torch.randn(4, 8, requires_grad=True)]


@case
def sequence_parallel(d: Make) -> Case:
    plan = {
        "norm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    return parallelize_module(Block(), d.mesh, plan), [torch.randn(2, 8, 8, requires_grad=True)]


@case
def dropout(d: Make) -> Case:
    return lambda x: F.dropout(x, 0.5), [d(8, 4)]


@case
def dropout_by_index(d: Make) -> Case:
    return lambda x: F.dropout(x, 0.5), [d(512, 256)]


@case
def local_function(d: Make) -> Case:
    on = [Shard(0)]
    mapped = local_map(lambda x, y: x * 2 + y, out_placements=on, in_placements=(on, on), device_mesh=d.mesh)
    return lambda x, y: mapped(x, y) * 2, [d(8, 4), d(8, 4)]


@case
def activation_checkpointing(d: Make) -> Case:
    def part(x: Tensor, y: Tensor) -> Tensor:
        return (x @ y).relu() @ y.t()

    arguments: list[Tensor] = [d(8, 4, on=Replicate()), d(4, 12, on=Shard(1))]
    return lambda x, y: checkpoint(part, x, y, use_reentrant=False), arguments


@case
def scalar_loss(d: Make) -> Case:
    return lambda x, y: F.mse_loss(x, y), [d(8, 4), d(8, 4)]


@case
def attention(d: Make) -> Case:
    heads: list[Tensor] = [d(2, 4, 8, 4, on=Shard(1)) for _ in range(3)]
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), heads


@case
def attention_over_positions(d: Make) -> Case:
    """As a ring: no number of ranks divides one head."""
    positions: list[Tensor] = [d(2, 1, 8, 4, on=Shard(2)) for _ in range(3)]
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), positions


@case
def language_model(d: Make) -> Case:
    def function(table: Tensor, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.embedding(tokens, table).flatten(0, 1) @ table.t(), targets.flatten())

    return function, [d(16, 8), d.indices(8, 4, on=Replicate()), d.indices(8, 4, on=Replicate())]


@case
def writes(d: Make) -> Case:
    return lambda x: x.clone().mul_(2).add_(1), [d(8, 4)]


@case
def views(d: Make) -> Case:
    return lambda x: x[2:6].reshape(-1).view(2, 8) * 2, [d(8, 4)]
