"""Parameters, inputs and outputs under each style have the placements of torch.distributed.tensor.parallel.

One rank of four, with a process group that moves nothing: enough for types, placements and shapes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.tensor as torch_tensor
import torch.distributed.tensor.parallel as torch_parallel
from torch import nn

import shardwise
from shardwise import parallel
from tests.parallel.models import Attention, Half, Mlp
from tests.worlds import lone_rank

IN, OUT = 16, 64


def described(value: Any) -> Any:
    """A tensor as kind, shape and placements."""
    if isinstance(value, tuple):
        return tuple(map(described, value))
    if not isinstance(value, torch.Tensor):
        return value
    placements = [repr(p) for p in value.placements] if hasattr(value, "placements") else None
    local = value.to_local() if hasattr(value, "to_local") else value
    getattr(local, "wait", bool)()  # theirs may still be under way
    return "DTensor" if placements else "Tensor", tuple(value.shape), tuple(local.shape), placements


def described_module(module: nn.Module) -> dict[str, Any]:
    return {name: described(tensor) for name, tensor in module.state_dict().items()}


def cases(p: Any, t: Any) -> dict[str, tuple[nn.Module, Any, tuple[int, ...]]]:
    """A module, a style or plan, and the shape of a local input; with the names of either library."""
    shard, replicated = t.Shard, t.Replicate()
    wide = (2, 8, IN)
    return {
        "colwise": (nn.Linear(IN, OUT), p.ColwiseParallel(), wide),
        "colwise, replicated output": (nn.Linear(IN, OUT), p.ColwiseParallel(output_layouts=replicated), wide),
        "colwise of a cut sequence": (nn.Linear(IN, OUT), p.ColwiseParallel(input_layouts=shard(1)), (2, 2, IN)),
        "colwise, DTensor": (nn.Linear(IN, OUT), p.ColwiseParallel(use_local_output=False), wide),
        "rowwise": (nn.Linear(OUT, IN), p.RowwiseParallel(), wide),
        "rowwise to a cut sequence": (nn.Linear(OUT, IN), p.RowwiseParallel(output_layouts=shard(1)), wide),
        "rowwise of a replicated input": (nn.Linear(IN, IN), p.RowwiseParallel(input_layouts=replicated), wide),
        "rowwise, DTensor": (nn.Linear(OUT, IN), p.RowwiseParallel(use_local_output=False), wide),
        "sequence": (nn.LayerNorm(IN), p.SequenceParallel(), (2, 2, IN)),
        "sequence, local": (nn.LayerNorm(IN), p.SequenceParallel(sequence_dim=0, use_local_output=True), (2, 2, IN)),
        "input": (
            nn.Identity(),
            p.PrepareModuleInput(input_layouts=shard(1), desired_input_layouts=replicated),
            (2, 2, IN),
        ),
        "input, local": (
            nn.Identity(),
            p.PrepareModuleInput(input_layouts=(shard(1),), desired_input_layouts=(replicated,), use_local_output=True),
            (2, 2, IN),
        ),
        "output": (
            nn.Identity(),
            p.PrepareModuleOutput(output_layouts=replicated, desired_output_layouts=shard(0)),
            (4, 8),
        ),
        "both": (
            nn.Identity(),
            p.PrepareModuleInputOutput(
                input_layouts=shard(0),
                desired_input_layouts=replicated,
                output_layouts=replicated,
                desired_output_layouts=shard(1),
                use_local_output=False,
            ),
            (4, 8),
        ),
        "mlp": (Mlp(), {"up": p.ColwiseParallel(), "down": p.RowwiseParallel()}, wide),
        "block": (
            Half(Attention()),
            {
                "norm": p.SequenceParallel(),
                "inner": p.PrepareModuleInput(input_layouts=shard(1), desired_input_layouts=replicated),
                "inner.[qkv]": p.ColwiseParallel(),
                "inner.o": p.RowwiseParallel(output_layouts=shard(1)),
            },
            (2, 2, IN),
        ),
    }


@pytest.mark.parametrize("name", cases(parallel, shardwise))
@pytest.mark.filterwarnings("ignore")
def test_kinds_and_placements(name) -> None:
    with lone_rank() as mesh:
        seen = []
        for p, t in ((torch_parallel, torch_tensor), (parallel, shardwise)):
            module, plan, shape = cases(p, t)[name]
            p.parallelize_module(module, mesh, plan)
            seen.append((described_module(module), described(module(torch.randn(shape)))))
        assert seen[0] == seen[1]


@pytest.mark.parametrize("style", ["ColwiseParallel", "RowwiseParallel"])
@pytest.mark.filterwarnings("ignore")
def test_embeddings(style) -> None:
    with lone_rank() as mesh:
        seen = []
        for p, t in ((torch_parallel, torch_tensor), (parallel, shardwise)):
            module = nn.Embedding(12, IN)
            p.parallelize_module(module, mesh, getattr(p, style)(input_layouts=t.Replicate()))
            seen.append((described_module(module), described(module(torch.zeros(2, 3, dtype=torch.long)))))
        assert seen[0] == seen[1]


@pytest.mark.filterwarnings("ignore")
def test_distribute_module() -> None:
    with lone_rank() as mesh:
        seen = []
        for t in (torch_tensor, shardwise):
            names = []

            def partition(name, module, mesh, t=t, names=names):
                names.append(name)
                if isinstance(module, nn.Linear):
                    module.weight = nn.Parameter(t.distribute_tensor(module.weight, mesh, [t.Shard(0)]))

            module = nn.Sequential(Mlp(), nn.BatchNorm1d(4))
            t.distribute_module(module, mesh, partition)
            seen.append((names, described_module(module)))
        assert seen[0] == seen[1]
