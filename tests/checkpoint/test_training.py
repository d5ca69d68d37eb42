"""Models and optimizers, saved and loaded as they are: every optimizer, fully sharded, tensor-parallel, 2-D, single."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import get_state_dict

import shardwise
from shardwise import Replicate, Shard, checkpoint, distribute_tensor, init_device_mesh
from shardwise.fsdp import fully_shard
from tests.processes.pool import on_processes
from tests.tensor.checkpoint.training import assert_bitwise, wholes
from tests.training.models import network, placed

OPTIMIZERS = [
    name
    for name, kind in vars(optim).items()
    if inspect.isclass(kind) and issubclass(kind, optim.Optimizer) and kind is not optim.Optimizer
]


class Run:
    """A model and its optimizer in one of four ways: all train alike."""

    def __init__(self, way: str, optimizer: str = "AdamW", ranks: int = 4) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 10, bias=False), nn.Linear(10, 5, bias=False))
        if optimizer != "Muon":  # which takes matrices alone
            model = network(dtype=torch.float32)
        sizes = {"tensor-parallel": (ranks,), "2-D": (2, ranks // 2), "fully sharded": (ranks,)}.get(way, ())
        self.mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("a", "b")[: len(sizes)]) if sizes else None
        if way == "fully sharded":
            for layer in model:
                fully_shard(layer, mesh=self.mesh)
            model = fully_shard(model, mesh=self.mesh)
        elif self.mesh is not None:
            replicated = [Replicate()] * (self.mesh.ndim - 1)
            model = placed(model, self.mesh, lambda name: [*replicated, Shard(0)])
        self.way, self.model = way, model
        self.optimizer = getattr(optim, optimizer)(model.parameters())

    def loss(self) -> Any:
        self.optimizer.zero_grad()
        inputs: Any = torch.randn(6, 6, generator=torch.Generator().manual_seed(4))
        if self.mesh is not None and self.way != "fully sharded":
            inputs = distribute_tensor(inputs, self.mesh, [Replicate()] * self.mesh.ndim)
        loss = self.model(inputs).square().mean()
        loss.backward()
        return loss

    def train(self, steps: int) -> Run:
        for _ in range(steps):
            if isinstance(self.optimizer, optim.LBFGS):
                self.optimizer.step(self.loss)
            elif isinstance(self.optimizer, optim.SparseAdam):  # distributed parameters have no sparse gradients
                for p in self.model.parameters():
                    moments = {name: p.detach() * factor for factor, name in ((3, "exp_avg"), (7, "exp_avg_sq"))}
                    self.optimizer.state[p] = {"step": 2, **moments}
            else:
                self.loss()
                self.optimizer.step()
        return self

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "step": 2}

    def values(self) -> dict[str, Any]:
        if isinstance(self.optimizer, optim.LBFGS):
            model, optimizer = self.model.state_dict(), self.optimizer.state_dict()
        else:
            model, optimizer = get_state_dict(self.model, self.optimizer)
        found = wholes({"model": model, "optimizer": optimizer})
        return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in found.items()}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer(tmp_path: Path, optimizer: str) -> None:
    """It loads into one that has made no step, on another mesh, whose parameters may have gradients already."""
    with shardwise.simulate(4):
        run = Run("2-D", optimizer).train(2)
        checkpoint.save(run.state(), tmp_path / "x")
        wanted = run.values()
    with shardwise.simulate(3):
        fresh = Run("tensor-parallel", optimizer, ranks=3)
        checkpoint.load(fresh.state(), tmp_path / "x")
        assert_bitwise(fresh.values(), wanted)
        fresh.train(1)
        fresh = Run("tensor-parallel", optimizer, ranks=3)
        if optimizer != "SparseAdam":
            fresh.loss()
        gradients = [parameter.grad for parameter in fresh.model.parameters()]
        checkpoint.load(fresh.state(), tmp_path / "x")
        assert_bitwise(fresh.values(), wanted)
        assert all(p.grad is gradient for p, gradient in zip(fresh.model.parameters(), gradients, strict=True))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_alone(tmp_path: Path, optimizer: str) -> None:
    """Without its module in the state, it is stored by the numbers of its parameters."""
    with shardwise.simulate(4):
        run = Run("2-D", optimizer).train(2)
        checkpoint.save({"optimizer": run.optimizer}, tmp_path / "x")
        wanted = run.values()
        fresh = Run("tensor-parallel", optimizer)
        checkpoint.save({"optimizer": fresh.optimizer}, tmp_path / "none")
        checkpoint.load({"optimizer": fresh.optimizer}, tmp_path / "none")
        assert not fresh.optimizer.state or optimizer == "Adagrad"  # which makes its state at once
        checkpoint.load({"optimizer": fresh.optimizer}, tmp_path / "x")
        checkpoint.save({"model": run.model}, tmp_path / "model")
        checkpoint.load({"model": fresh.model}, tmp_path / "model")
        assert_bitwise(fresh.values(), wanted)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_lbfgs_goes_on_where_it_was(tmp_path: Path, steps: int) -> None:
    """Whatever the history of the one that loads it, the next step is that of the one that was saved."""
    with shardwise.simulate(4):
        run = Run("tensor-parallel", "LBFGS")
        run.optimizer.param_groups[0].update(max_iter=4)
        run.train(2)
        checkpoint.save(run.state(), tmp_path / "x")
        other = Run("tensor-parallel", "LBFGS")
        other.optimizer.param_groups[0].update(max_iter=3)
        other.train(steps)
        checkpoint.load(other.state(), tmp_path / "x")
        assert_bitwise(other.values(), run.values())
        assert_bitwise(other.train(1).values(), run.train(1).values())
        moved = Run("single", "LBFGS")
        checkpoint.load(moved.state(), tmp_path / "x")
        moved.train(1)
        for mine, theirs in zip(moved.model.parameters(), run.model.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs.full_tensor().shards[0], rtol=1e-4, atol=1e-6)


def test_sparse_adam(tmp_path: Path) -> None:
    def made() -> tuple[nn.Module, optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Embedding(12, 5, sparse=True)
        return model, optim.SparseAdam(model.parameters())

    model, optimizer = made()
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.tensor([1, 3, 3])).square().sum().backward()
        optimizer.step()
    checkpoint.save({"model": model, "optimizer": optimizer}, tmp_path / "x")
    other_model, other = made()
    checkpoint.load({"model": other_model, "optimizer": other}, tmp_path / "x")
    assert torch.equal(other_model.weight, model.weight)
    for name, value in optimizer.state[model.weight].items():
        found = other.state[other_model.weight][name]
        assert torch.equal(found, value) if isinstance(value, torch.Tensor) else found == value


WAYS = ("fully sharded", "tensor-parallel", "2-D", "single")


@pytest.mark.parametrize("source", WAYS)
def test_across_all_ways(tmp_path: Path, source: str) -> None:
    with shardwise.simulate(4):
        run = Run(source).train(2)
        checkpoint.save(run.state(), tmp_path / "x")
        wanted = run.values()
        for target in WAYS:
            other = Run(target)
            checkpoint.load(other.state(), tmp_path / "x")
            assert_bitwise(other.values(), wanted)
            other.train(1)


@on_processes
def test_across_all_ways_on_processes(tmp_path: Path) -> None:
    for source, target in (("fully sharded", "2-D"), ("tensor-parallel", "fully sharded"), ("2-D", "single")):
        run = Run(source).train(2)
        checkpoint.async_save(run.state(), tmp_path / source)
        wanted = run.values()
        run.train(1)
        other = Run(target)
        state = {**other.state(), "step": 0}
        checkpoint.load(state, tmp_path / source)
        assert state["step"] == 2
        assert_bitwise(other.values(), wanted)


def test_an_optimizer_alone(tmp_path: Path) -> None:
    """Without its module in the state, it is saved by the numbers of its parameters, as its state dict is."""
    with shardwise.simulate(4):
        run, other = Run("2-D").train(2), Run("2-D").train(1)
        checkpoint.save({"optimizer": run.optimizer}, tmp_path / "x")
        checkpoint.load({"optimizer": other.optimizer}, tmp_path / "x")
        other.model.load_state_dict(run.model.state_dict())
        assert_bitwise(other.values(), run.values())


def test_a_module_on_the_meta_device(tmp_path: Path) -> None:
    with shardwise.simulate(4):
        run = Run("2-D").train(1)
        checkpoint.save({"model": run.model}, tmp_path / "x")
        other = Run("tensor-parallel").model.to("meta")
        checkpoint.load({"model": other}, tmp_path / "x")
        assert_bitwise(wholes(other.state_dict()), wholes(run.model.state_dict()))
        assert other[0].weight.placements == (Shard(0),)
        assert isinstance(other[0].weight, nn.Parameter)


class Counter:
    """Any object with a state."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_objects_with_a_state(tmp_path: Path) -> None:
    counter = Counter()
    counter.count = 3
    checkpoint.save({"data": counter}, tmp_path / "x")
    other = Counter()
    checkpoint.load({"data": other}, tmp_path / "x")
    assert other.count == 3


def test_meta_tensors_get_memory(tmp_path: Path) -> None:
    with shardwise.simulate(2):
        mesh = init_device_mesh("cpu", (2,))
        checkpoint.save({"x": torch.arange(4.0), "y": torch.ones(2)}, tmp_path / "x")
        state = {
            "x": distribute_tensor(torch.zeros(4), mesh, [Shard(0)]).to("meta"),
            "y": torch.empty(2, device="meta"),
        }
        checkpoint.load(state, tmp_path / "x")
        assert torch.equal(state["x"].full_tensor().shards[1], torch.arange(4.0))
        assert torch.equal(state["y"], torch.ones(2))
