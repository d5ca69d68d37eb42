"""Every random op, on every mesh and placement: the same global tensor, bit by bit, and the same generator state."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise
from shardwise import InterleavedShard, P, Partial, Placement, Replicate, Shard, init_device_mesh
from shardwise.random import draw
from tests.ops.helpers import r, ranks, whole
from tests.processes.pool import on_processes
from tests.random.draws import DRAWS, FILLS, OWN_WAYS, SHAPE

x = r(*SHAPE).float()
ONE_AXIS: list[Placement] = [Replicate(), Shard(0), Shard(1), InterleavedShard(1, 3), Partial()]
TWO_AXES: list[Any] = [*itertools.product(ONE_AXIS[:4], repeat=2), P(("b", "a")), P(None, ("b", "a"))]
TWO_AXES += [[Partial(), Shard(1)], [Partial("avg"), Partial("max")]]
MESHES: dict[tuple[int, ...], list[Any]] = {(1,): [[Shard(0)]], (4,): [[p] for p in ONE_AXIS]}
MESHES |= {(2, 2): TWO_AXES, (2, 3): TWO_AXES}
ROUNDS = {"gumbel_softmax", "attention"}  # sums over a sharded dim round differently


def some(name: str, count: int) -> dict[tuple[int, ...], list[Any]]:
    """A few placements on each mesh, others for each op."""
    chooser = random.Random(name)
    return {sizes: chooser.sample(choices, min(count, len(choices))) for sizes, choices in MESHES.items()}


def everywhere(fn: Callable[..., Tensor], meshes: dict[tuple[int, ...], list[Any]]) -> list[tuple[Any, Tensor, Tensor]]:
    """For each mesh and placement what is drawn from one seed, and the state of the generator after that."""
    found = []
    for sizes, choices in meshes.items():
        with ranks(*sizes) as mesh:
            for placements in choices:
                given = shardwise.distribute_tensor(x, mesh, placements)
                torch.manual_seed(5)
                value = whole(fn(given)).clone()
                found.append(((sizes, placements), value, torch.get_rng_state()))
    return found


def same(found: list[tuple[Any, Tensor, Tensor]], first: Tensor, state: Tensor, name: str) -> None:
    assert (first != first.flatten()[0]).any()
    for case, value, after in found:
        if name in ROUNDS:
            torch.testing.assert_close(value, first, rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(value, first), case
        assert torch.equal(after, state), case


@pytest.mark.parametrize("name", DRAWS)
def test_by_index(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw, "GLOBAL_DRAW_LIMIT", 0)
    found = everywhere(
        DRAWS[name], some(name, 99 if name in ("uniform_", "normal_", "bernoulli") else 7 if name in FILLS else 4)
    )
    same(found, *found[0][1:], name)


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("exact", [False, True])
def test_global_draws_are_those_of_plain_torch(name: str, exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if exact:
        monkeypatch.setattr(draw, "GLOBAL_DRAW_LIMIT", 0)
    torch.manual_seed(5)
    expected = DRAWS[name](x.clone())  # type: ignore[arg-type]
    state = torch.get_rng_state()
    with shardwise.random.exact(exact):
        found = everywhere(DRAWS[name], some(name, 1 if exact else 2))
    if name in OWN_WAYS and not exact:
        expected, state = found[0][1:]
    same(found, expected, state, name)


@pytest.mark.parametrize("name", ["uniform_", "normal of tensors", "bernoulli_", "randint_like", "dropout"])
@on_processes
def test_on_processes(name: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draw, "GLOBAL_DRAW_LIMIT", 0)
        torch.manual_seed(5)
        found = []
        for sizes, choices in {(4,): MESHES[(4,)], (2, 2): random.Random(name).sample(TWO_AXES, 3)}.items():
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("a", "b")[: len(sizes)])
            for placements in choices:
                given = shardwise.distribute_tensor(x, mesh, placements)
                torch.manual_seed(5)
                found.append(((sizes, placements), DRAWS[name](given).full_tensor(), torch.get_rng_state()))
        same(found, *found[0][1:], name)
