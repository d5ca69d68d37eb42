"""replicate: data parallel with distributed or local inputs, in buckets."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import DTensor, P, Partial, Replicate, Shard, distribute_tensor, init_device_mesh, replicate, simulate
from shardwise.debug import CommDebugMode
from shardwise.errors import InputError, PlacementError
from shardwise.fsdp import fully_shard
from shardwise.nn import ReplicateModule
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from shardwise.sharding.mesh import MeshInfo, mesh_info_of
from tests.processes.pool import on_processes
from tests.processes.reference import mesh_of
from tests.training.parameters import whole_of


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 6)
        self.head = nn.Linear(6, 6, bias=False)
        self.head.weight = nn.Parameter(torch.randn(6, 6))
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.head.weight
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.tied(self.head(self.down(torch.tanh(self.norm(self.up(x))))))


def rows(seed: int, count: int = 8) -> Tensor:
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))


def check_local_batches(mesh: Any) -> None:
    """Each rank its own batch: the average of what each rank would compute alone."""
    size = mesh.size()
    for checkpointed in (False, True):
        model = replicate(Net().double(), mesh=mesh)
        ones = [Net().double() for _ in range(size)]
        for step in range(2):
            batch = distribute_tensor(rows(step).double(), mesh, [Shard(0)]).to_local()

            def run(module: nn.Module, x: Tensor, checkpointed: bool = checkpointed) -> Tensor:
                return (checkpoint(module, x, use_reentrant=False) if checkpointed else module(x)).square().mean()

            loss = run(model, batch)
            assert not isinstance(loss, DTensor)
            with CommDebugMode() as comm:
                loss.backward()
            assert comm.get_comm_counts()[torch.ops.c10d_functional.all_reduce] == 1
            for one, piece in zip(ones, rows(step).double().chunk(size), strict=True):
                run(one, piece).backward()
        for name, parameter in model.named_parameters():
            wanted = [dict(one.named_parameters())[name].grad for one in ones]
            if wanted[0] is None:
                assert parameter.grad is None
                continue
            assert parameter.grad.placements == (Replicate(),)
            torch.testing.assert_close(whole_of(parameter.grad), torch.stack(wanted).mean(0))
        for name, buffer in model.named_buffers():  # those of the first rank
            assert isinstance(buffer, DTensor)
            torch.testing.assert_close(whole_of(buffer), dict(ones[0].named_buffers())[name])


def test_local_batches() -> None:
    with simulate(4):
        check_local_batches(init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)))


@pytest.mark.parametrize("local", [False, True])
def test_a_model_goes_with_its_last_reference(local: bool) -> None:
    def step() -> tuple[weakref.ref[nn.Module], weakref.ref[MeshInfo]]:
        with simulate(4):
            mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
            model = replicate(Net(), mesh=mesh)
            batch = distribute_tensor(rows(0), mesh, [Shard(0)])
            model(batch.to_local() if local else batch).square().mean().backward()
            return weakref.ref(model), weakref.ref(mesh_info_of(mesh))

    gc.collect()
    model, mesh_info = step()
    assert model() is None  # in no cycle: a garbage collection does not see through `.grad`
    gc.collect()
    assert mesh_info() is None


def test_copies_have_a_view_of_their_own() -> None:
    with simulate(4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        model = replicate(Net(), mesh=mesh)
        model.unused = nn.Linear(2, 2)  # the replicated one is gone
        batch = distribute_tensor(rows(0), mesh, [Shard(0)]).to_local()
        twin = copy.deepcopy(model)
        del model
        assert not isinstance(twin(batch), DTensor)
        assert all(isinstance(twin.get_parameter(f"{name}.weight"), DTensor) for name in ("up", "norm", "down", "tied"))
        assert not isinstance(twin.up(batch), DTensor)


@on_processes
def test_local_batches_on_processes() -> None:
    check_local_batches(mesh_of(4))


@on_processes
def test_buffers_over_two_axes_without_a_group_of_both_on_processes() -> None:
    """Their groups were not created: the mesh is a slice that does not cover the world."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "cp", "tp"))["dp", "cp"]
    one, model = Net(), replicate(Net(), mesh=mesh)
    assert (0, 1) not in mesh_info_of(mesh).groups
    model(rows(mesh.get_local_rank("dp")))
    one(rows(0))
    torch.testing.assert_close(whole_of(model.norm.running_var), one.norm.running_var)


def train(model: nn.Module, place: Any, steps: int = 8) -> list[Tensor]:
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        model(place(rows(step, 7))).square().mean().backward()  # 7 rows: unevenly
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return [whole_of(p) if isinstance(p, DTensor) else p.detach() for p in model.parameters()]


def check_one_device(mesh: Any) -> None:
    wanted = train(Net(), lambda x: x)
    for size in (None, 0.0001):
        model = replicate(Net(), mesh=mesh, bucket_cap_mb=size)
        for found, one in zip(train(model, lambda x: distribute_tensor(x, mesh, [Shard(0)])), wanted, strict=True):
            torch.testing.assert_close(found, one, rtol=1e-4, atol=1e-4)


def test_one_device() -> None:
    with simulate(4):
        check_one_device(init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)))


@on_processes
def test_one_device_on_processes() -> None:
    check_one_device(mesh_of(4))


@pytest.mark.parametrize("local", [False, True])
def test_accumulation_without_communication(local: bool) -> None:
    with simulate(4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        model, other = replicate(Net().double().eval(), mesh=mesh), replicate(Net().double().eval(), mesh=mesh)

        def loss_of(module: nn.Module, seed: int) -> Tensor:
            batch = distribute_tensor(rows(seed).double(), mesh, [Shard(0)])
            return module(batch.to_local() if local else batch).square().mean()

        losses = [loss_of(model, seed) for seed in range(3)]
        with CommDebugMode() as comm:
            model.set_requires_gradient_sync(False)
            losses[0].backward()
            model.set_requires_gradient_sync(True)
            with model.no_sync():
                losses[1].backward()
        assert comm.get_total_counts() == 0
        assert model.up.weight.grad.placements == (Partial("avg" if local else "sum"),)
        with CommDebugMode() as comm:
            losses[2].backward()
        assert comm.get_total_counts() == 1
        for seed in range(3):
            loss_of(other, seed).backward()
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            if q.grad is not None:
                torch.testing.assert_close(whole_of(p.grad), whole_of(q.grad))


def test_around_tensor_parallel() -> None:
    """On its own axis, as in PyTorch, with local batches; or on the mesh of both, as on one device."""

    def mlp() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)).double()

    plan = {"1": ColwiseParallel(), "3": RowwiseParallel()}
    with simulate(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        one, x = mlp(), rows(1).double()
        one(x).square().mean().backward()

        model = replicate(parallelize_module(mlp(), mesh["tp"], plan), mesh=mesh["dp"])
        model(distribute_tensor(x, mesh["dp"], [Shard(0)]).to_local()).square().mean().backward()
        assert model[1].weight.placements == (Replicate(), Shard(0))
        for (name, p), q in zip(model.named_parameters(), one.parameters(), strict=True):
            assert p.grad.placements == p.placements
            torch.testing.assert_close(whole_of(p.grad), q.grad, msg=name)

        whole = {path: type(style)(use_local_output=False) for path, style in plan.items()}
        model = replicate(parallelize_module(mlp(), mesh, whole), mesh=mesh["dp"])
        model(distribute_tensor(x[:7], mesh, P("dp"))).square().mean().backward()
        one.zero_grad()
        one(x[:7]).square().mean().backward()
        for p, q in zip(model.parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(whole_of(p.grad), q.grad)


def test_what_is_ignored_stays_plain() -> None:
    with simulate(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        net = Net()
        model = replicate(net, [net.unused], mesh=mesh, ignored_params=[net.down.bias], static_graph=True)
        assert model is net
        assert isinstance(model, Net)
        assert isinstance(model, ReplicateModule)
        plain = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
        assert plain == ["down.bias", "unused.weight", "unused.bias"]


def test_copies_submodules_and_errors() -> None:
    with simulate(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = replicate(Net().eval(), mesh=mesh)
        copied = copy.deepcopy(model)
        copied(rows(1)).sum().backward()
        assert model.up.weight.grad is None
        assert copied.up.weight.grad is not None
        assert not isinstance(model.up(rows(1)), DTensor)  # one of its modules alone
        with pytest.raises(RuntimeError):
            model(torch.randn(3, 5))
        assert all(isinstance(p, DTensor) for p in model.parameters())
        assert model.state_dict()["up.weight"].placements == (Replicate(),)
        with pytest.raises(InputError, match="twice"):
            replicate(model, mesh=mesh)
        with pytest.raises(InputError, match="mixed_precision"):
            replicate(Net(), mesh=mesh, mixed_precision=object())
        with pytest.raises(PlacementError, match="over dp"):
            replicate(shardwise.shard_parameters(Net(), mesh, P("dp")), mesh=mesh)


def test_the_default_mesh_is_made_once() -> None:
    with simulate(4):
        one, other = (replicate(nn.Linear(3, 3)).weight.device_mesh for _ in range(2))
        assert one is other
        assert fully_shard(nn.Linear(3, 3)).weight.device_mesh is one


@on_processes
def test_the_first_rank_s_parameters_and_the_default_mesh() -> None:
    torch.manual_seed(dist.get_rank())
    model = replicate(nn.Linear(3, 3))
    torch.manual_seed(0)
    torch.testing.assert_close(model.weight.to_local(), nn.Linear(3, 3).weight)
