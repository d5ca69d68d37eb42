"""The programs of `pains` give the one-device answer, simulated and on real processes."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardwise
from shardwise import Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from shardwise.testing import check, make_dtensor
from tests.processes.pool import on_processes
from tests.programs.pains import PAINS


@pytest.mark.parametrize("name", PAINS)
def test_simulated(name) -> None:
    program, tensors = PAINS[name]
    assert check(program, *tensors, limit=30).cases >= 25


def run(program, tensors: list[Tensor]) -> list[Tensor]:
    """The result and the gradients; what is written to is a value made from the tensors, not a leaf."""
    leaves = [t.requires_grad_() if t.is_floating_point() else t for t in tensors]
    result = program(*(t * 1 for t in leaves))
    if not isinstance(result, Tensor):
        return [torch.tensor(result)]
    result.sin().sum().backward()
    return [result.detach(), *(t.grad for t in leaves if t.requires_grad)]


@pytest.mark.parametrize("name", PAINS)
@on_processes
def test_on_processes(name) -> None:
    program, tensors = PAINS[name]
    expected = run(program, [t.clone() for t in tensors])
    for sizes in ((4,), (2, 2)):
        mesh = init_device_mesh("cpu", sizes)
        chooser = random.Random(name)
        for _ in range(6):
            cut = []
            for i, tensor in enumerate(tensors):
                options = [Replicate(), *map(Shard, range(tensor.dim())), *[Partial()] * tensor.is_floating_point()]
                cut.append(make_dtensor(tensor, mesh, [chooser.choice(options) for _ in sizes], seed=i))
            what = f"{name} with {[t.placements for t in cut]}"
            for found, wanted in zip(run(program, cut), expected, strict=True):
                value = found.full_tensor() if isinstance(found, shardwise.DTensor) else found
                torch.testing.assert_close(value, wanted, rtol=1e-4, atol=1e-5, msg=lambda m, what=what: f"{what}: {m}")


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_linear_on_a_cut_sequence_communicates_nothing(mode) -> None:
    x, weight, bias = PAINS["linear"][1]
    with shardwise.simulate(4), mode():
        mesh = init_device_mesh("cpu", (4,))
        cut = distribute_tensor(x, mesh, [Shard(1)])
        parameters = [distribute_tensor(t, mesh, [Replicate()]) for t in (weight, bias)]
        with shardwise.explicit():
            result = F.linear(cut, *parameters)
        assert result.placements == (Shard(1),)
        torch.testing.assert_close(shardwise.world.common(result.full_tensor()), F.linear(x, weight, bias))


def test_every_way_to_cut_a_convolution() -> None:
    """Width and height too, which need the neighbours' columns and rows, forward and backward."""
    program, tensors = PAINS["convolution"]
    ways = [[[Shard(dim)], [Replicate()]] for dim in range(4)] + [[[Replicate()], [Shard(dim)]] for dim in range(2)]
    assert check(program, *tensors, meshes=((2,), (3,), (4,)), placements=ways).cases == 18
    both = [[list(pair), [Replicate()] * 2] for pair in itertools.product(map(Shard, range(4)), repeat=2)]
    assert check(program, *tensors, meshes=((2, 2),), placements=both).cases == 16
