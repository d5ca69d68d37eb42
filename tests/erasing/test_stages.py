"""Recordings in stages that run on fixed memory, as CUDA graphs do; here each stage is run again op by op."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from shardwise import P, distribute_tensor, erase
from shardwise.erasing import replay
from shardwise.erasing.callees import bindings_of
from shardwise.erasing.program import Program
from shardwise.erasing.stages import Run
from tests.erasing.steps import batch, full, model_on
from tests.worlds import mesh_of


def on_fixed_memory(graph: fx.Graph, given: list[Tensor]) -> Run:
    """In the place of `captured`: reads and writes the memory of the first inputs."""
    program, static = Program(graph, bindings_of(graph), {}), list(given)

    def run(*given: Tensor) -> tuple[Tensor, ...]:
        for here, tensor in zip(static, given, strict=True):
            if tensor is not here:
                here.copy_(tensor)
        return program.run(*static)

    return run


@pytest.fixture
def mesh(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(replay._BACKENDS, "cudagraph", on_fixed_memory)
    with mesh_of(2, 2, names=("a", "b")) as mesh:
        yield mesh


def test_earlier_arguments_are_not_written(mesh: Any) -> None:
    def losses(backend: str | None) -> list[Tensor]:
        model = model_on(mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

        def step(x: Tensor, seen: Tensor) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.add_(x.sum(0))
            return loss.detach()

        run = erase(step, backend=backend) if backend else step
        passed = [(batch(mesh, seed), distribute_tensor(torch.zeros(8), mesh, P())) for seed in range(4)]
        found = [run(*each) for each in passed]
        for seed, (x, _) in enumerate(passed):
            assert torch.equal(full(x), full(batch(mesh, seed)))
        return [full(value) for value in (*found, *(seen for _, seen in passed), *model.parameters())]

    torch.testing.assert_close(losses("cudagraph"), losses(None), rtol=0, atol=0)


def test_gradients_that_are_added_to_may_be_other_tensors(mesh: Any) -> None:
    def gradients(backend: str | None) -> list[Tensor]:
        model, found = model_on(mesh), []

        def step(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            return loss.detach()

        run = erase(step, backend=backend) if backend else step
        for seed in range(5):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, float(seed))
            run(batch(mesh, seed))
            found += [parameter.grad for parameter in model.parameters()]
        return [full(grad) for grad in found]

    torch.testing.assert_close(gradients("cudagraph"), gradients(None), rtol=0, atol=0)


def test_expanded_arguments(mesh: Any) -> None:
    run = erase(lambda x: (x * 2).sum(1), backend="cudagraph")
    for seed in range(3):
        x = batch(mesh, seed, rows=4)[:, :1].expand(4, 3)
        torch.testing.assert_close(full(run(x)), full((x * 2).sum(1)))
