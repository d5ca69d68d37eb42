"""A small model in stages, and its training on one device and as a pipeline."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise import DeviceMesh, DTensor, P, Replicate, distribute_module
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from shardwise.pipeline import Pipeline

WORDS, WIDTH, ROWS, LENGTH = 11, 8, 7, 5


class Block(nn.Module):
    def __init__(self, first: bool, last: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH) if first else None
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS) if last else None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.words is None else self.words(x)
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return x if self.head is None else self.head(x)


def stages_of(count: int, tied: bool = False) -> list[nn.Module]:
    torch.manual_seed(0)
    stages = [Block(index == 0, index == count - 1) for index in range(count)]
    if tied:
        assert stages[0].words is not None
        assert stages[-1].head is not None
        stages[-1].head.weight = stages[0].words.weight
    return list(stages)


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batches(steps: int, rows: int = ROWS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(WORDS, (rows, LENGTH + 1), generator=generator) for _ in range(steps)]


STYLES = {
    "up": ColwiseParallel(use_local_output=False),
    "down": RowwiseParallel(use_local_output=False),
    "head": ColwiseParallel(use_local_output=False),
}


def tensor_parallel(stage: nn.Module, mesh: DeviceMesh) -> None:
    """Shard over tp, replicate over dp; gradients are summed over dp."""
    parallelize_module(stage, mesh, {name: style for name, style in STYLES.items() if getattr(stage, name) is not None})
    distribute_module(stage, mesh)


class Pair(nn.Module):
    """Passes two tensors on, one of which needs no gradient."""

    def __init__(self, stage: nn.Module, last: bool) -> None:
        super().__init__()
        self.stage, self.last = stage, last

    def forward(self, x: Tensor, count: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        y = self.stage(x)
        if self.last:
            assert count is not None
            return y + 0 * count
        return y, torch.ones(1, dtype=torch.int64)


def local_tensor_parallel(stage: nn.Module, mesh: DeviceMesh) -> None:
    """Shard over tp; the stage takes and returns local tensors."""
    parallelize_module(stage, mesh, {"stage.up": ColwiseParallel(), "stage.down": RowwiseParallel()})


def local_pipeline(mesh: DeviceMesh) -> Pipeline:
    stages = [Pair(stage, last) for stage, last in zip(stages_of(2), (False, True), strict=True)]
    return Pipeline(stages, mesh, "pp", local_tensor_parallel, loss_fn=loss_fn, microbatches=3)


def check_local(mesh: DeviceMesh) -> None:
    """Local tensors, several of them, go from stage to stage."""
    losses, expected = trained_alone(2, 1)
    model = local_pipeline(mesh)
    words = batches(1)[0]
    torch.testing.assert_close(model.step(words[:, :-1], target=words[:, 1:]).item(), losses[0], rtol=1e-5, atol=0)
    reference = nn.ModuleList(stages_of(2))
    loss_fn(reference[1](reference[0](words[:, :-1])), words[:, 1:]).backward()
    for name, parameter in model.named_parameters():
        index, _, path = name.replace(".stage", "").partition(".")
        assert parameter.grad is not None
        assert f"{index}.{path}" in expected
        torch.testing.assert_close(full(parameter.grad), reference[int(index)].get_parameter(path).grad)


def trained_alone(count: int, steps: int, tied: bool = False) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of a training on one device, and the parameters after it."""
    model = nn.ModuleDict({str(index): stage for index, stage in enumerate(stages_of(count, tied))})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for words in batches(steps):
        x = words[:, :-1]
        for stage in model.values():
            x = stage(x)
        loss = loss_fn(x, words[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    named = model.named_parameters(remove_duplicate=False)
    return losses, {name: parameter.detach() for name, parameter in named}


def trained(model: Pipeline, steps: int) -> list[float]:
    """The losses of a training as a pipeline."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for words in batches(steps):
        losses.append(model.step(words[:, :-1], target=words[:, 1:]).item())
        model.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def full(parameter: Tensor) -> Tensor:
    found = parameter.detach()
    found = found.full_tensor() if isinstance(found, DTensor) else found
    return getattr(found, "shards", (found,))[0]


def pipeline_of(
    mesh: DeviceMesh, count: int = 2, microbatches: int = 3, schedule: str = "1f1b", tied: bool = False
) -> Pipeline:
    placements = P("dp") if "dp" in (mesh.mesh_dim_names or ()) else [Replicate()]
    return Pipeline(
        stages_of(count, tied),
        mesh,
        "pp",
        tensor_parallel,
        loss_fn=loss_fn,
        microbatches=microbatches,
        schedule=schedule,
        placements=placements,
    )


def check(model: Pipeline, count: int, steps: int, tied: bool = False) -> None:
    """Train, and compare losses and parameters with one device."""
    losses, expected = trained_alone(count, steps, tied)
    torch.testing.assert_close(trained(model, steps), losses, rtol=1e-4, atol=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(full(parameter), expected[name], rtol=1e-4, atol=1e-4)
