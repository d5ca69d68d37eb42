"""Activations computed again in the backward pass: the same numbers, dropout included."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import record_function
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import shardwise
from shardwise import init_device_mesh
from shardwise.debug import CommDebugMode
from tests.ops.helpers import ranks
from tests.processes.pool import on_processes
from tests.training.models import PLACINGS, cut_batch, network, placed
from tests.training.parameters import whole_of


def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keep = op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def inner_layers(module: nn.Sequential, x: torch.Tensor, reentrant: bool) -> torch.Tensor:
    """Each half of the layers computed again by itself."""
    for half in (module[:3], module[3:]):
        x = checkpoint(half, x, use_reentrant=reentrant)
    return x


WAYS: dict[str, Any] = {
    "reentrant": lambda module, x: checkpoint(module, x, use_reentrant=True),
    "not reentrant": lambda module, x: checkpoint(module, x, use_reentrant=False),
    "in segments": lambda module, x: checkpoint_sequential(module, 2, x, use_reentrant=False),
    "selective": lambda module, x: checkpoint(
        module, x, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, policy)
    ),
    "selective, by a list of ops": lambda module, x: checkpoint(
        module,
        x,
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default]),
    ),
    "with contexts": lambda module, x: checkpoint(
        module, x, use_reentrant=False, context_fn=lambda: (record_function("forward"), CommDebugMode())
    ),
    "nested": lambda module, x: checkpoint(inner_layers, module, x, False, use_reentrant=False),
    "nested, reentrant inside": lambda module, x: checkpoint(inner_layers, module, x, True, use_reentrant=False),
    "nested in reentrant": lambda module, x: checkpoint(inner_layers, module, x, False, use_reentrant=True),
    "segments, reentrant": lambda module, x: checkpoint_sequential(module, 2, x, use_reentrant=True),
    "by name": lambda module, x: checkpoint(lambda *, inputs: module(inputs), inputs=x, use_reentrant=False),
}


def gradients(module: nn.Module, run: Any, mesh: Any) -> list[torch.Tensor]:
    torch.manual_seed(3)
    x = cut_batch(1, mesh).requires_grad_()
    out = run(module, x)
    out.square().mean().backward()
    assert all(p.grad.placements == p.placements for p in module.parameters())
    return [whole_of(t) for t in (out, x.grad, *(p.grad for p in module.parameters()))]


@pytest.mark.parametrize("run", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("name", PLACINGS)
def test_the_same_numbers_with_dropout(name: str, run: Any) -> None:
    with ranks(2, 2) as mesh:
        check_same_numbers(mesh, name, run)


@on_processes
def test_the_same_numbers_on_processes() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    for way in ("reentrant", "selective", "nested"):
        check_same_numbers(mesh, "tensor parallel", WAYS[way])


def check_same_numbers(mesh: Any, name: str, run: Any) -> None:
    wanted = gradients(placed(network(0.5), mesh, PLACINGS[name]), lambda module, x: module(x), mesh)
    assert (wanted[0] == 0).float().mean() < 0.5
    found = gradients(placed(network(0.5), mesh, PLACINGS[name]), run, mesh)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("reentrant", [True, False])
def test_without_the_state_of_the_generator(reentrant: bool) -> None:
    def run(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(module, x, use_reentrant=reentrant, preserve_rng_state=False)
        return result

    with ranks(2, 2) as mesh:
        make = lambda: placed(network(), mesh, PLACINGS["tensor parallel"])  # noqa: E731  # without dropout
        found, wanted = gradients(make(), run, mesh), gradients(make(), lambda module, x: module(x), mesh)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b)
        torch.manual_seed(0)
        before = torch.get_rng_state()
        with_dropout = placed(network(0.5), mesh, PLACINGS["tensor parallel"])
        torch.set_rng_state(before)
        run(with_dropout, cut_batch(1, mesh).requires_grad_()).sum().backward()
        drawn_twice = torch.get_rng_state()
        torch.set_rng_state(before)
        for _ in range(2):
            with_dropout(cut_batch(1, mesh))
        assert torch.equal(torch.get_rng_state(), drawn_twice)


def test_early_stop_and_determinism_checks() -> None:
    with ranks(2, 2) as mesh:
        module = placed(network(0.5), mesh, PLACINGS["tensor parallel"])
        whole = checkpoint(module, cut_batch(1, mesh), use_reentrant=False, determinism_check="default", debug=False)
        with torch.utils.checkpoint.set_checkpoint_early_stop(False):
            whole.sum().backward()


@pytest.mark.parametrize("name", PLACINGS)
def test_accumulated_over_checkpointed_passes(name: str) -> None:
    def train(deferred: bool) -> list[torch.Tensor]:
        module = placed(network(), mesh, PLACINGS[name])
        for seed in (1, 2):
            with shardwise.accumulate_gradients(deferred and seed == 1):
                checkpoint(module, cut_batch(seed, mesh), use_reentrant=False).square().mean().backward()
        return [whole_of(p.grad) for p in module.parameters()]

    with ranks(2, 2) as mesh:
        for a, b in zip(train(True), train(False), strict=True):
            torch.testing.assert_close(a, b)
