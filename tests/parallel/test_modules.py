"""distribute_module; parallelizing keeps ties, requires_grad, buffers and modules on the meta device."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from shardwise import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from shardwise.errors import InputError, PlacementError
from shardwise.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from tests.parallel.models import Half, Mlp, first, line_of, made


@pytest.fixture
def mesh():
    with line_of(4) as mesh:
        yield mesh


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor([2.0]))
        self.again = nn.ModuleDict({"head": self.head})

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens) * self.scale)


PLANS = {
    "both": {"embedding": RowwiseParallel(use_local_output=False), "head": ColwiseParallel(use_local_output=False)},
    "one": {"embedding": RowwiseParallel(use_local_output=False)},
    "the other": {"head": ColwiseParallel(use_local_output=False)},
}


@pytest.mark.parametrize("plan", PLANS)
def test_tied_weights_stay_one(mesh, plan) -> None:
    alone = made(Tied)
    tokens = torch.randint(0, 10, (2, 5))
    alone(tokens).square().sum().backward()
    model = parallelize_module(made(Tied), mesh, PLANS[plan])
    assert model.head.weight is model.embedding.weight
    distribute_module(model, mesh)
    assert model.head.weight is model.embedding.weight
    assert model.head.weight.placements == (Shard(0),)
    assert len(list(model.parameters())) == 1
    model(distribute_tensor(tokens, mesh, [Replicate()])).square().sum().backward()
    torch.testing.assert_close(first(model.head.weight.grad), alone.head.weight.grad)


def test_tied_weights_cannot_be_sharded_in_two_ways(mesh) -> None:
    with pytest.raises(PlacementError, match=r"module 'head': 'weight' is distributed already, as f32\[10, 8@tp\]"):
        parallelize_module(Tied(), mesh, {"embedding": "colwise", "head": "colwise"})


def test_a_partition_of_ones_own(mesh) -> None:
    seen = []

    def partition(name, module, mesh):
        seen.append(name)
        if isinstance(module, nn.Embedding):
            module.weight = nn.Parameter(distribute_tensor(module.weight, mesh, [Shard(1)]))

    model = distribute_module(Tied(), mesh, partition)
    assert seen == ["", "embedding", "head", "again"]
    assert model.head.weight is model.embedding.weight
    assert model.head.weight.placements == (Shard(1),)
    assert model.scale.placements == (Replicate(),)
    assert dict(model.named_buffers()).keys() == {"scale"}


def test_inputs_and_outputs_are_seen(mesh) -> None:
    model = distribute_module(
        made(lambda: nn.Linear(8, 8)),
        mesh,
        input_fn=lambda module, inputs, mesh: tuple(distribute_tensor(x, mesh, [Shard(0)]) for x in inputs),
        output_fn=lambda module, output, mesh: output.full_tensor(),
    )
    x = torch.randn(6, 8)
    torch.testing.assert_close(first(model(x)), made(lambda: nn.Linear(8, 8))(x).detach())
    with pytest.raises(InputError, match="input_fn takes 1 arguments"):
        distribute_module(nn.Linear(2, 2), mesh, input_fn=lambda inputs: inputs)


def test_requires_grad_and_gradients_and_marks_are_kept(mesh) -> None:
    linear = nn.Linear(8, 8)
    linear.bias.requires_grad_(False)
    linear.weight.grad = torch.randn(8, 8)
    linear.weight.mark = "kept"
    expected = linear.weight.grad
    parallelize_module(linear, mesh, ColwiseParallel())
    assert [p.requires_grad for p in linear.parameters()] == [True, False]
    assert all(isinstance(p, nn.Parameter) for p in linear.parameters())
    assert linear.weight.mark == "kept"
    assert linear.weight.grad.placements == (Shard(0),)
    assert torch.equal(first(linear.weight.grad), expected)


def test_buffers_keep_what_they_are(mesh) -> None:
    norm = nn.BatchNorm1d(4)
    norm.register_buffer("note", torch.tensor([1, 2]), persistent=False)
    parallelize_module(norm, mesh, SequenceParallel(sequence_dim=0))
    assert all(isinstance(b, DTensor) for b in norm.buffers())
    assert norm.note.dtype == torch.int64
    assert norm.state_dict().keys() == nn.BatchNorm1d(4).state_dict().keys()


def test_from_the_meta_device(mesh) -> None:
    with torch.device("meta"):
        model = Half(Mlp())
    plan = {"norm": SequenceParallel(), "inner.up": "colwise", "inner.down": "rowwise"}
    parallelize_module(model, mesh, plan)
    assert all(p.is_meta and isinstance(p, DTensor) for p in model.parameters())
    placements = {name: p.placements for name, p in model.named_parameters()}
    assert placements["inner.up.weight"] == (Shard(0),)
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    for module in (model.norm, model.inner.up, model.inner.down):
        module.reset_parameters()
    assert {name: p.placements for name, p in model.named_parameters()} == placements
    # The numbers are those of the same modules with replicated parameters.
    replicated = distribute_module(Half(Mlp()), mesh)
    torch.manual_seed(3)
    for module in (replicated.norm, replicated.inner.up, replicated.inner.down):
        module.reset_parameters()
    for mine, its in zip(model.parameters(), replicated.parameters(), strict=True):
        assert torch.equal(first(mine), first(its))
    x = distribute_tensor(torch.randn(2, 8, 16), mesh, [Shard(1)])
    model.inner.down(model.inner.up(model.norm(x))).sum().backward()
    assert all(p.grad.placements == p.placements for p in model.parameters())


def test_a_parallelized_module_is_copied_and_saved(mesh) -> None:
    model = parallelize_module(made(Mlp), mesh, {"up": "colwise", "down": "rowwise"})
    x = distribute_tensor(torch.randn(2, 16), mesh, [Replicate()])
    twin = copy.deepcopy(model)
    assert torch.equal(first(twin(x)), first(model(x)))
    other = parallelize_module(Mlp(), mesh, {"up": "colwise", "down": "rowwise"})
    other.load_state_dict(model.state_dict())
    assert torch.equal(first(other(x)), first(model(x)))
