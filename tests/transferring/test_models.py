"""A model that is trained under `fully_shard` on some ranks generates, tensor-parallel, on others."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise import Replicate, Shard, distribute_tensor, simulate, transfer
from shardwise.fsdp import fully_shard
from shardwise.transferring import Part


class Separate(nn.Module):
    """A feed-forward layer as trained: gate and up apart."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.gate, self.up, self.down = (nn.Linear(a, b, bias=False) for a, b in ((8, 12), (8, 12), (12, 8)))
        self.norm = nn.LayerNorm(8)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embed(tokens))
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Fused(nn.Module):
    """The same layer as a generator has it: each rank has its rows of gate, then those of up."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks = ranks
        self.embed = nn.Embedding(20, 8)
        self.gate_up, self.down = nn.Linear(8, 24, bias=False), nn.Linear(12, 8, bias=False)
        self.norm = nn.LayerNorm(8)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embed(tokens))
        gate, up = self.gate_up(x).unflatten(-1, (self.ranks, 2, -1)).unbind(-2)
        return self.down((F.silu(gate) * up).flatten(-2))


def test_weights_go_to_the_generator_after_each_step() -> None:
    with simulate(8):
        trainer = DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("fsdp",))
        ranks = DeviceMesh("cpu", [4, 5, 6], mesh_dim_names=("tp",))
        torch.manual_seed(0)
        alone, model = Separate(), Separate()
        model.load_state_dict(alone.state_dict())
        fully_shard(model, mesh=trainer)
        generator = _distributed(Fused(3), ranks)

        def convert(name: str) -> Any:
            fused = {"gate.weight": 0, "up.weight": 1}
            return Part("gate_up.weight", fused[name], groups=3) if name in fused else name

        optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (alone, model)]
        tokens = torch.randint(0, 20, (8, 3))
        for _ in range(2):
            for each, optimizer in zip((alone, model), optimizers, strict=True):
                given = tokens if each is alone else distribute_tensor(tokens, trainer, [Shard(0)])
                optimizer.zero_grad()
                each(given).square().mean().backward()
                optimizer.step()
            transfer(model.state_dict(), convert=convert, into=generator.state_dict())
            with torch.no_grad():
                found = generator(distribute_tensor(tokens, ranks, [Replicate()]))
                torch.testing.assert_close(found.full_tensor().shards[0], alone(tokens))


def _distributed(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """A module whose matrices are sharded over tp."""
    sharded = {"gate_up.weight": Shard(0), "down.weight": Shard(1), "embed.weight": Shard(1)}
    for name, parameter in list(module.named_parameters()):
        owner, _, last = name.rpartition(".")
        placed = distribute_tensor(parameter.detach(), mesh, [sharded.get(name, Replicate())])
        setattr(module.get_submodule(owner), last, nn.Parameter(placed))
    return module
