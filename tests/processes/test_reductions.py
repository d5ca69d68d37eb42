"""Reductions, norms and losses between real processes: kernels talk over process groups, NaN survives the way."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from shardwise import Replicate, Shard, distribute_tensor
from tests.processes.pool import on_processes
from tests.processes.reference import mesh_of

TARGET = torch.tensor([0, 6, -100, 3, 3])

OPS = {
    "amax": lambda x: x.amax(0),
    "amin of all": lambda x: x.amin(),
    "mean": lambda x: x.mean(),
    "max": lambda x: x.max(0),
    "min": lambda x: x.min(1),
    "argmax": lambda x: x.argmax(),
    "any": lambda x: x.isnan().any(0),
    "norm": lambda x: torch.linalg.vector_norm(x, math.inf),
    "var": lambda x: torch.var_mean(x, (0, 1)),
    "softmax": lambda x: x.softmax(1),
    "log_softmax": lambda x: x.log_softmax(0),
    "logsumexp": lambda x: x.logsumexp((0, 1)),
    "cumsum": lambda x: x.cumsum(0),
    "cummax": lambda x: x.cummax(1),
    "topk": lambda x: x.topk(3, 1),
    "layer_norm": lambda x: F.layer_norm(x, (7,)),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "equal": lambda x: torch.equal(x, x * 1),
    "item": lambda x: x.sum().item(),
}


def same(found, expected) -> None:
    if isinstance(expected, tuple):
        for pair in zip(found, expected, strict=True):
            same(*pair)
    elif isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found.full_tensor(), expected, equal_nan=True)
    else:
        assert found == pytest.approx(expected)


@pytest.mark.parametrize("sizes", [(4,), (2, 2)])
@on_processes
def test_one_device_answer(sizes) -> None:
    mesh = mesh_of(*sizes)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 7, generator=generator)
    cuts = [[Shard(0)] * len(sizes), [Shard(1)] * len(sizes), [Replicate(), Shard(0)][-len(sizes) :]]
    if len(sizes) == 2:
        cuts += [[Shard(1), Shard(0)]]
    for placements in cuts:
        for name, op in OPS.items():
            same(op(distribute_tensor(x, mesh, placements)), op(x))
            if name in ("amax", "amin of all", "max", "argmax", "norm"):
                for row in (0, 4):  # whichever rank has it
                    torn = x.clone()
                    torn[row, 3] = math.nan
                    same(op(distribute_tensor(torn, mesh, placements)), op(torn))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@on_processes
def test_cross_entropy(reduction) -> None:
    mesh = mesh_of(2, 2)
    generator = torch.Generator().manual_seed(0)
    plain = torch.randn(5, 7, generator=generator).requires_grad_()
    weight = torch.rand(7, generator=generator)
    options = {"reduction": reduction, "label_smoothing": 0.1}
    expected = F.cross_entropy(plain, TARGET, weight, **options)
    (gradient,) = torch.autograd.grad(expected.sum(), plain)
    for placements in ([Shard(0), Shard(1)], [Shard(1), Replicate()], [Shard(0), Shard(0)]):
        x = distribute_tensor(plain.detach(), mesh, placements).requires_grad_()
        found = F.cross_entropy(
            x,
            distribute_tensor(TARGET, mesh, [Shard(0), Replicate()]),
            distribute_tensor(weight, mesh, [Replicate(), Shard(0)]),
            **options,
        )
        same(found.detach(), expected.detach())
        same(torch.autograd.grad(found.sum(), x)[0], gradient)
