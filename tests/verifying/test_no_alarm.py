"""Right programs of many kinds, which must raise no alarm."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import P, Replicate, Shard, distribute_module, replicate
from shardwise.fsdp import fully_shard
from shardwise.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from .pieces import MLP, shard_of

X, Y = torch.randn(4, 6, 4), torch.randn(4, 6, 4)


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.out = nn.ModuleList(MLP() for _ in range(2)), nn.LayerNorm(4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Recomputed(Blocks):
    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.out(x)


def sequence_parallel(model, mesh):
    local = {"use_local_output": True}
    plan = {
        "blocks.0": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1), **local),
        "blocks.*.norm": SequenceParallel(**local),
        "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
        "out": SequenceParallel(**local),
        "": PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate(), **local),
    }
    parallelize_module(model, mesh["tp"], plan)


def sharded_in_two_ways(model, mesh):
    parallelize_module(
        model, mesh["tp"], {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    )  # fmt: skip
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


def data_parallel(model, mesh):
    replicate(model, mesh=mesh["dp"])


def distributed(model, mesh):
    distribute_module(model, mesh)


def rows(batch, mesh):
    return tuple(shard_of(x, 0, mesh, "dp") for x in batch)


def mixed_precision(model, batch, mesh):
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.mse_loss(model(batch[0]).float(), batch[1].float())
    loss.backward()
    return loss


@pytest.mark.parametrize(
    ("model", "apply", "options"),
    [
        (Blocks, sequence_parallel, {"loss": F.mse_loss}),
        (Blocks, sharded_in_two_ways, {"loss": F.mse_loss, "place": rows}),
        (Blocks, data_parallel, {"loss": F.mse_loss, "place": rows}),
        (Recomputed, distributed, {"loss": F.mse_loss, "place": P("dp")}),
        (Blocks, distributed, {"step": mixed_precision, "place": P("dp"), "dtype": None}),
    ],
    ids=["sequence parallel", "fully_shard and tp", "replicate", "checkpointing", "autocast"],
)
def test_a_right_program(model, apply, options):
    report = shardwise.verify(model, apply, (X, Y), mesh=(2, 2), names=("dp", "tp"), steps=2, **options)
    assert report.ok, str(report)
    assert report.compared > 100
