"""Parameters that modules share stay shared, however the modules are distributed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise import DTensor, P, Placement, Replicate, Shard, distribute_module, distribute_tensor, shard_parameters
from shardwise.errors import PlacementError
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from tests.ops.helpers import ranks
from tests.training.parameters import whole_of


class Tied(nn.Module):
    """A language model whose head shares the weight of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(10, 6)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("shift", torch.ones(6))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.embed(ids) + self.shift)) * self.scale


IDS = torch.randint(10, (4, 5), generator=torch.Generator().manual_seed(0))


def train(model: nn.Module, ids: Tensor, optimizer: torch.optim.Optimizer | None = None) -> list[Tensor]:
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.05)
    for _ in range(3):
        loss = F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [whole_of(parameter) for parameter in model.parameters()]


def check(model: Tied, mesh: DeviceMesh) -> None:
    assert model.head.weight is model.embed.weight
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    ids = distribute_tensor(IDS, mesh, [Replicate()] * mesh.ndim)
    torch.testing.assert_close(train(model, ids), train(Tied(), IDS), rtol=1e-4, atol=1e-5)


def replaced(module: nn.Module, mesh: DeviceMesh, placements: list[Placement]) -> None:
    """What a partition function does."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        if parameter.dim():
            module.register_parameter(name, nn.Parameter(distribute_tensor(parameter.data, mesh, placements)))


def test_partition_fn() -> None:
    with ranks(2) as mesh:
        check(distribute_module(Tied(), mesh, lambda name, module, mesh: replaced(module, mesh, [Shard(0)])), mesh)


def test_partition_fn_for_one_owner() -> None:
    def partition(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        if name == "head":
            replaced(module, mesh, [Shard(1)])

    with ranks(2) as mesh:
        model = distribute_module(Tied(), mesh, partition)
        assert model.embed.weight.placements == (Shard(1),)
        check(model, mesh)


def test_a_partition_fn_that_would_untie_is_refused() -> None:
    def partition(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        replaced(module, mesh, [Shard(0 if name == "embed" else -1)])

    with ranks(2) as mesh, pytest.raises(PlacementError, match=r"'embed.weight' and 'head.weight' were one tied"):
        distribute_module(Tied(), mesh, partition)


@pytest.mark.parametrize("placements", [P("a"), P(("a", "b")), [Shard(0), Replicate()], None], ids=str)
def test_shard_parameters_by_placement(placements: P | list[Placement] | None) -> None:
    with ranks(2, 2) as mesh:
        model = shard_parameters(Tied(), mesh, placements)
        assert model.scale.placements == (Replicate(), Replicate())
        assert isinstance(model.shift, DTensor)
        check(model, mesh)


def test_shard_parameters_by_name() -> None:
    asked = []

    def by_name(name: str, parameter: Tensor) -> P | None:
        asked.append((name, tuple(parameter.shape)))
        return {"head.weight": P("b", "a"), "body.0.weight": P(None, "b"), "body.0.bias": P("a")}.get(name)

    with ranks(2, 2) as mesh:
        model = shard_parameters(Tied(), mesh, by_name)
        assert ("embed.weight", (10, 6)) in asked
        assert ("head.weight", (10, 6)) in asked
        assert model.embed.weight.placements == (Shard(1), Shard(0))
        assert model.body[0].weight.placements == (Replicate(), Shard(1))
        assert model.body[2].weight.placements == (Replicate(), Replicate())
        check(model, mesh)


def test_shard_parameters_refuses_different_placements_for_one_parameter() -> None:
    def by_name(name: str, parameter: Tensor) -> P:
        return P("a") if name == "embed.weight" else P()

    with ranks(2) as mesh, pytest.raises(PlacementError, match=r"'embed.weight' and 'head.weight' are one tied"):
        shard_parameters(Tied(), mesh, by_name)


def test_shard_parameters_names_the_parameter_in_errors() -> None:
    with ranks(2) as mesh, pytest.raises(PlacementError, match=r"parameter 'body.0.bias' of shape \[8\]"):
        shard_parameters(Tied(), mesh, [Shard(1)])


def test_shard_parameters_leaves_distributed_ones() -> None:
    with ranks(2) as mesh:
        model = Tied()
        parallelize_module(model, mesh, {"body.0": ColwiseParallel(use_local_output=False)})
        shard_parameters(model, mesh, P())
        assert model.body[0].weight.placements == (Shard(0),)
        check(model, mesh)


def test_styles() -> None:
    plan = {"embed": RowwiseParallel(use_local_output=False), "head": ColwiseParallel(use_local_output=False)}
    with ranks(2) as mesh:
        check(distribute_module(parallelize_module(Tied(), mesh, plan), mesh), mesh)


def test_styles_that_would_untie_are_refused() -> None:
    plan = {"embed": ColwiseParallel(), "head": ColwiseParallel()}
    with ranks(2) as mesh, pytest.raises(PlacementError, match="module 'head': 'weight' is distributed already"):
        parallelize_module(Tied(), mesh, plan)


def test_parts_that_are_distributed_one_after_another() -> None:
    with ranks(2) as mesh:
        model = Tied()
        parallelize_module(model.embed, mesh, RowwiseParallel(use_local_output=False))
        parallelize_module(model.head, mesh, ColwiseParallel(use_local_output=False))
        check(distribute_module(model, mesh), mesh)
        model = Tied()
        shard_parameters(model.embed, mesh, [Shard(1)])
        check(distribute_module(model, mesh), mesh)
        model = Tied()
        shard_parameters(model.embed, mesh, [Shard(1)])
        with pytest.raises(PlacementError, match="distributed already"):
            parallelize_module(model.head, mesh, ColwiseParallel())


def test_a_parameter_that_another_world_distributed() -> None:
    """Ties hold within one mesh."""
    model = Tied()
    head = model.head
    with ranks(2) as mesh:
        distribute_module(model.embed, mesh)
    with ranks(2) as mesh:
        assert distribute_module(head, mesh).weight.device_mesh is mesh


def test_buffers_that_nothing_will_fill() -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"layer": nn.Linear(4, 4), "norm": nn.BatchNorm1d(4)})
        model["layer"].register_buffer("table", torch.ones(4), persistent=False)
    with ranks(2) as mesh, pytest.warns(UserWarning, match=r"buffers layer\.table are on the meta device") as caught:
        distribute_module(model, mesh)
    assert len(caught) == 1
