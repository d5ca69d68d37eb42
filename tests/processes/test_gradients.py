"""Gradients across processes are those of one device."""

import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise import DTensor, InterleavedShard, P, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from tests.processes.pool import on_processes
from tests.processes.reference import cut, mesh_of, plain_placements

SHAPE = (5, 6)


def numbers() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(SHAPE, dtype=torch.float64), torch.randn(SHAPE, dtype=torch.float64)


def weighted(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x * x * weight).sum()


@pytest.mark.parametrize("sizes", [(4,), (2, 2)])
@on_processes
def test_redistribute(sizes) -> None:
    mesh = mesh_of(*sizes)
    whole, weight = numbers()
    special = [P(("b", "a")), P("a", partial={"b": "sum"})] if mesh.ndim == 2 else [[InterleavedShard(1, 3)]]
    every = [*plain_placements(mesh, 2), *special]
    for source in every[::2]:
        for target in every:
            x = distribute_tensor(whole, mesh, source).requires_grad_()
            y = x.redistribute(placements=target)
            weighted(y.full_tensor(), weight).backward()
            what = f"{source} -> {target}"
            assert x.grad.device_mesh == mesh
            assert not any(p.is_partial() for p in x.grad.placements), what
            torch.testing.assert_close(x.grad.full_tensor(), 2 * whole * weight, msg=what)


@on_processes
def test_from_local_and_to_local() -> None:
    mesh = mesh_of(2, 2)
    whole, weight = numbers()
    at = mesh.get_coordinate()
    for placements in ([Shard(0), Shard(1)], [Shard(1), Shard(1)], P(("b", "a")), [Replicate(), Shard(0)]):
        local = cut(whole, mesh, placements, at).clone().requires_grad_()
        x = DTensor.from_local(local, mesh, placements, shape=whole.shape)
        weighted(x.full_tensor(), weight).backward()
        torch.testing.assert_close(local.grad, cut(2 * whole * weight, mesh, placements, at))

        leaf = distribute_tensor(whole, mesh, placements).requires_grad_()
        weighted(leaf.to_local(), cut(weight, mesh, placements, at)).backward()
        assert leaf.grad.placements == leaf.placements
        torch.testing.assert_close(leaf.grad.full_tensor(), 2 * whole * weight)


@on_processes
def test_operands_of_a_sum_each_get_the_whole_gradient() -> None:
    mesh = mesh_of(4)
    whole, weight = numbers()
    local = (whole * (dist.get_rank() + 1)).requires_grad_()
    x = DTensor.from_local(local, mesh, [Partial()])
    weighted(x.full_tensor(), weight).backward()
    torch.testing.assert_close(local.grad, 2 * (10 * whole) * weight)


@on_processes
def test_operands_of_an_average_each_get_the_whole_gradient() -> None:
    mesh = mesh_of(4)
    whole, weight = numbers()
    local = whole.clone().requires_grad_()
    weighted(DTensor.from_local(local, mesh, [Partial("avg")]).full_tensor(), weight).backward()
    torch.testing.assert_close(local.grad, 2 * whole * weight)


@on_processes
def test_given_gradient_placements() -> None:
    mesh = mesh_of(4)
    whole, weight = numbers()
    # Each rank uses its replica for a part of the loss: its gradient is one summand of the whole.
    x = distribute_tensor(whole, mesh, [Replicate()]).requires_grad_()
    mine = cut(torch.arange(6), mesh, [Shard(0)], [dist.get_rank()])
    weighted(x.to_local(grad_placements=[Partial()])[:, mine], weight[:, mine]).backward()
    torch.testing.assert_close(x.grad.full_tensor(), 2 * whole * weight)
    # And from_local hands out the gradient in summands when asked to.
    local = whole.clone().requires_grad_()
    y = DTensor.from_local(local, mesh, [Replicate()], grad_placements=[Partial()])
    weighted(y.full_tensor(), weight).backward()
    total = local.grad.clone()
    dist.all_reduce(total)
    torch.testing.assert_close(total, 2 * whole * weight)


@on_processes
def test_full_tensor_with_partial_gradients() -> None:
    mesh = mesh_of(4)
    whole, weight = numbers()
    x = distribute_tensor(whole, mesh, [Shard(0)]).requires_grad_()
    full = x.full_tensor(grad_placements=[Partial()])
    weighted(full, weight * (dist.get_rank() + 1)).backward()  # each rank has a loss of its own
    torch.testing.assert_close(x.grad.full_tensor(), 2 * whole * weight * 10)
    assert x.grad.placements == x.placements


@on_processes
def test_twice() -> None:
    mesh = mesh_of(4)
    whole, weight = numbers()
    x = distribute_tensor(whole, mesh, [Shard(0)]).requires_grad_()
    loss = ((x.redistribute(placements=[Shard(1)]).full_tensor() ** 3) * weight).sum()
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    torch.testing.assert_close(first.full_tensor(), 3 * whole**2 * weight)
    (second,) = torch.autograd.grad(first.full_tensor().sum(), x)
    torch.testing.assert_close(second.full_tensor(), 6 * whole * weight)


@on_processes
def test_through_a_submesh() -> None:
    mesh = mesh_of(2, 2)
    whole, weight = numbers()
    scale = 1.0 + dist.get_rank() // 2
    x = distribute_tensor(whole * scale, mesh["b"], [Shard(0)]).requires_grad_()
    weighted(x.redistribute(placements=[Shard(1)]).full_tensor(), weight).backward()
    torch.testing.assert_close(x.grad.full_tensor(), 2 * scale * whole * weight)


@on_processes
def test_async() -> None:
    mesh = mesh_of(4)
    whole, weight = numbers()
    x = distribute_tensor(whole, mesh, [Shard(0)]).requires_grad_()
    weighted(x.redistribute(placements=[Shard(1)], async_op=True).full_tensor(), weight).backward()
    torch.testing.assert_close(x.grad.full_tensor(), 2 * whole * weight)


def test_a_plain_local_tensor_in_the_simulated_world() -> None:
    # All ranks share the tensor, but each has a gradient of its own for it, as in a process of its own.
    with shardwise.simulate(4):
        mesh = init_device_mesh("cpu", (4,))
        leaf = torch.arange(6.0, dtype=torch.float64).view(2, 3).requires_grad_()
        weight = torch.arange(24.0, dtype=torch.float64).view(8, 3)
        x = DTensor.from_local(2 * leaf, mesh, [Shard(0)])
        assert x.requires_grad
        (x.full_tensor() * weight).sum().backward()
        for rank, grad in enumerate(leaf.grad.shards):
            torch.testing.assert_close(grad, 2 * weight[2 * rank : 2 * rank + 2])
