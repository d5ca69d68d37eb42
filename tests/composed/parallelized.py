"""The ways to parallelize the model, by the axes of a mesh."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from shardwise import DeviceMesh, P, distribute_module, replicate
from shardwise.fsdp import fully_shard
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from shardwise.pipeline import Pipeline
from tests.composed.models import example, loss_of, new_model, options


def fully_sharded(mesh: DeviceMesh, experts: int = 0) -> Any:
    """As the example does: tp and ep by styles, all parameters sharded over dp."""
    return example().parallelize(new_model(experts), mesh, options(experts))


def replicated(mesh: DeviceMesh, experts: int = 0) -> nn.Module:
    """Experts over ep; everything is replicated over dp, and gradients are reduced in buckets."""
    model = parallelize_module(new_model(experts), mesh, {"blocks.*.mlp.experts": example().ExpertParallel()})
    return replicate(model, mesh=mesh["dp"])


class First(nn.Module):
    """The first half of the model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.letters, self.block = model.letters, model.blocks[0]

    def forward(self, tokens: Tensor) -> Tensor:
        return self.block(self.letters(tokens))


class Second(nn.Module):
    """The second half."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.block, self.norm, self.head = model.blocks[1], model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.block(x)))


NAMES = {"0.letters": "letters", "0.block": "blocks.0", "1.block": "blocks.1", "1.norm": "norm", "1.head": "head"}
"""The modules of the stages, by their names in the model."""


def sharded_stage(stage: nn.Module, mesh: DeviceMesh) -> None:
    """Tp and fully_shard, on the ranks of one stage."""
    plan = {
        "block.attention.query": ColwiseParallel(use_local_output=False),
        "block.attention.key": ColwiseParallel(use_local_output=False),
        "block.attention.value": ColwiseParallel(use_local_output=False),
        "block.attention.out": RowwiseParallel(use_local_output=False),
        "block.mlp.gate": ColwiseParallel(use_local_output=False),
        "block.mlp.up": ColwiseParallel(use_local_output=False),
        "block.mlp.down": RowwiseParallel(use_local_output=False),
    }
    parallelize_module(stage, mesh, plan)
    distribute_module(stage, mesh)
    fully_shard(stage.block, mesh=mesh["dp"])
    fully_shard(stage, mesh=mesh["dp"])


def pipelined(mesh: DeviceMesh) -> Pipeline:
    """Two stages over pp."""
    model = new_model()
    return Pipeline(
        [First(model), Second(model)], mesh, "pp", sharded_stage, loss_fn=loss_of, microbatches=2, placements=P("dp")
    )
