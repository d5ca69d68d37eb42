"""Linear modules that are not torch's: GPT-2's transposed ones, and those that adapters of peft wrap."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardwise import DTensor, Replicate, Shard
from shardwise.parallel import parallelize_module
from tests.parallel.models import follows_one_device, line_of

transformers = pytest.importorskip("transformers")


class Gpt2Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        conv = transformers.pytorch_utils.Conv1D
        self.up, self.down = conv(32, 16), conv(16, 32)
        nn.init.normal_(self.up.bias)
        nn.init.normal_(self.down.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class PlainMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(12, 16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.embed(x))))


def adapted(targets: list[str]) -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=targets, r=4, lora_dropout=0.0)
    model: Any = peft.inject_adapter_in_model(config, PlainMlp())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(True)
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.2)
    return model


@pytest.mark.parametrize("plan", [{"up": "colwise", "down": "rowwise"}, {"up": "colwise_rep", "down": "rowwise_rep"}])
def test_transposed_linear(plan: dict[str, str]) -> None:
    with line_of(4) as mesh:
        follows_one_device(Gpt2Mlp, lambda m, mesh: parallelize_module(m, mesh, plan), mesh, torch.randn(2, 3, 16))
        mlp = parallelize_module(Gpt2Mlp(), mesh, plan)
        assert mlp.up.weight.placements == (Shard(1),)
        assert mlp.up.bias.placements == (Shard(0),)
        assert mlp.down.weight.placements == (Shard(0),)
        assert mlp.down.bias.placements == (Replicate(),)


def test_adapters_of_linears() -> None:
    plan = {"up": "colwise", "down": "rowwise"}
    with line_of(4) as mesh:
        follows_one_device(
            lambda: adapted(["up", "down"]),
            lambda m, mesh: parallelize_module(m, mesh, plan),
            mesh,
            torch.randint(0, 12, (2, 3)),
        )
        mlp = parallelize_module(adapted(["up", "down"]), mesh, plan)
        assert mlp.up.lora_B.default.weight.placements == (Shard(0),)
        assert mlp.up.lora_A.default.weight.placements == (Replicate(),)
        assert mlp.down.lora_A.default.weight.placements == (Shard(1),)
        assert mlp.down.lora_B.default.weight.placements == (Replicate(),)


@pytest.mark.parametrize("style", ["embedding_rowwise", "embedding_colwise"])
def test_adapters_of_embeddings(style: str) -> None:
    with line_of(4) as mesh:
        follows_one_device(
            lambda: adapted(["embed"]),
            lambda m, mesh: parallelize_module(m, mesh, {"embed": style}),
            mesh,
            torch.randint(0, 12, (2, 3)),
        )
        model = parallelize_module(adapted(["embed"]), mesh, {"embed": style})
        sharded = {n for n, p in model.named_parameters() if isinstance(p, DTensor) and p.placements != (Replicate(),)}
        which = "A" if style == "embedding_rowwise" else "B"
        assert sharded == {"embed.base_layer.weight", f"embed.lora_embedding_{which}.default"}
