"""The model of examples/train.py, cut in every way a training program cuts it, and the losses of its training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from examples.train import GPT, PLAN, batches, distribute, train
from shardwise import DeviceMesh, P, Placement, Replicate, Shard, distribute_module, distribute_tensor
from shardwise.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, loss_parallel, parallelize_module

STEPS, LENGTH, ROWS = 8, 8, 5  # 5 rows: no number of ranks shares them evenly

_split = ColwiseParallel(input_layouts=Shard(1), use_local_output=False)
_gather = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
SEQUENCE_PLAN = {
    **{path: _split if isinstance(style, ColwiseParallel) else _gather for path, style in PLAN.items()},
    "blocks.*.attention_norm": SequenceParallel(),
    "blocks.*.mlp_norm": SequenceParallel(),
    "norm": SequenceParallel(),
}


def new_model(device: str = "cpu") -> GPT:
    """A small one; on every call the same."""
    torch.manual_seed(0)
    return GPT(width=16, heads=4, layers=2, length=LENGTH).to(device)


def by_placement(place: Callable[[Tensor], list[Placement]]) -> Callable[[nn.Module, DeviceMesh], nn.Module]:
    """Distribute every parameter by itself, without styles and hooks."""

    def cut(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                cut = distribute_tensor(parameter.data, mesh, place(parameter))
                module.register_parameter(name, nn.Parameter(cut))
        return model

    return cut


def sequence_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    parallelize_module(model, mesh, SEQUENCE_PLAN)
    return distribute_module(model, mesh)


class Program(NamedTuple):
    """The axes of the mesh, how the model and every batch are cut, and what is around the training."""

    axes: tuple[str, ...]
    cut: Callable[[nn.Module, DeviceMesh], nn.Module]
    batch: P
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


PROGRAMS = {
    "data parallel, uneven batch": Program(("dp",), distribute_module, P("dp")),
    "tensor parallel": Program(("tp",), distribute, P()),
    "tensor and sequence parallel": Program(("tp",), sequence_parallel, P(), loss_parallel),
    "dp x tp": Program(("dp", "tp"), distribute, P("dp")),
    "every parameter sharded": Program(("dp",), by_placement(lambda p: [Shard(0)]), P("dp")),
    "placements alone": Program(("dp", "tp"), by_placement(lambda p: [Replicate(), Shard(p.dim() - 1)]), P("dp")),
}


def expected_losses(device: str = "cpu") -> list[float]:
    """The losses on one device."""
    return train(new_model(device), batches(STEPS, ROWS, LENGTH, device))


def losses(program: Program, mesh: DeviceMesh) -> list[float]:
    """The losses of a program on a mesh with its axes."""
    device = mesh.device_type
    model = program.cut(new_model(device), mesh)
    with program.around():
        return train(
            model, batches(STEPS, ROWS, LENGTH, device), lambda tensor: distribute_tensor(tensor, mesh, program.batch)
        )
