"""A model under fully_shard learns what it learns on one device: 8 steps of AdamW with clipping, an uneven batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from shardwise.comm.rank_group import named_group
from shardwise.fsdp import fully_shard
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from tests.fsdp.models import Model, assert_same_parameters, full, new_model, on_one_device, shard, train
from tests.processes.pool import on_processes
from tests.worlds import mesh_of

Inputs = Callable[[Tensor], Tensor]


def one_axis(model: Model, mesh: DeviceMesh) -> Inputs:
    shard(model, mesh)
    return lambda tokens: distribute_tensor(tokens, mesh, [Shard(0)])


def two_axes(model: Model, mesh: DeviceMesh) -> Inputs:
    shard(model, mesh)
    return lambda tokens: distribute_tensor(tokens, mesh, [Shard(0), Shard(0)])


def with_tensor_parallel(model: Model, mesh: DeviceMesh) -> Inputs:
    """Activations are distributed over both axes."""
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel(use_local_output=False)})
    shard(model, mesh["dp"])
    return lambda tokens: distribute_tensor(tokens, mesh, [Shard(0), Replicate()])


def with_local_tensor_parallel(model: Model, mesh: DeviceMesh) -> Inputs:
    """Activations are distributed over dp, and local with respect to tp."""
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    shard(model, mesh["dp"])
    return lambda tokens: distribute_tensor(tokens, mesh["dp"], [Shard(0)])


WAYS = {
    "fsdp": (one_axis, (8,), (4,), ("dp",)),
    "hsdp": (two_axes, (2, 4), (2, 2), ("replicate", "dp")),
    "fsdp x tp": (with_tensor_parallel, (4, 2), (2, 2), ("dp", "tp")),
    "fsdp x local tp": (with_local_tensor_parallel, (4, 2), (2, 2), ("dp", "tp")),
}


def check(way: str, mesh: DeviceMesh) -> None:
    expected, expected_losses = on_one_device()
    model = new_model()
    inputs = WAYS[way][0](model, mesh)
    losses = train(model, inputs)
    for loss, wanted in zip(losses, expected_losses, strict=True):
        torch.testing.assert_close(full(loss), wanted, atol=1e-4, rtol=1e-4)
    assert_same_parameters(model, expected)


@pytest.mark.parametrize("way", WAYS)
def test_distributed_inputs(way: str) -> None:
    with mesh_of(*WAYS[way][1], names=WAYS[way][3]) as mesh:
        check(way, mesh)


@pytest.mark.parametrize("way", ["fsdp", "hsdp", "fsdp x tp"])
@on_processes
def test_on_processes(way: str) -> None:
    check(way, init_device_mesh("cpu", WAYS[way][2], mesh_dim_names=WAYS[way][3]))


def check_local_inputs(mesh: DeviceMesh, data: DeviceMesh) -> None:
    """Each rank has an equal part of the batch of its own: the average of the gradients is that of the whole batch."""
    expected, _ = on_one_device(rows=16)
    model = new_model()
    if data is not mesh:
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    shard(model, data)
    train(model, lambda tokens: distribute_tensor(tokens, data, [Shard(0)] * data.ndim).to_local(), rows=16)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert_same_parameters(model, expected)


def test_local_inputs() -> None:
    with mesh_of(8, names=("dp",)) as mesh:
        check_local_inputs(mesh, mesh)
    with mesh_of(2, 4, names=("replicate", "dp")) as mesh:
        check_local_inputs(mesh, mesh)
    with mesh_of(4, 2, names=("dp", "tp")) as mesh:
        check_local_inputs(mesh, mesh["dp"])


@on_processes
def test_local_inputs_on_processes() -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    check_local_inputs(mesh, mesh)


def test_an_axis_that_was_flattened() -> None:
    """Sequences sharded over cp, sequences of a batch over dp: both are data axes of the parameters."""
    expected, _ = on_one_device()
    with mesh_of(2, 2, 2, names=("dp", "cp", "tp")) as mesh:
        data = mesh["dp", "cp"]._flatten("dp_cp")
        model = new_model()
        for block in model.blocks:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel(use_local_output=False)})
        shard(model, data)
        assert str(model.blocks[0].up.weight.spec) == "f32[48@(tp, dp_cp), 16]"
        train(model, lambda tokens: distribute_tensor(tokens, mesh, [Shard(0), Shard(1), Replicate()]))
        assert_same_parameters(model, expected)


@on_processes
def test_neighbours_on_processes() -> None:
    if dist.get_rank() < 3:  # ranks are in different numbers of groups
        named_group((0, 1, 2))
    expected, _ = on_one_device(rows=16)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    model = shard(new_model(), mesh, reshard_after_forward=2)
    train(model, lambda tokens: distribute_tensor(tokens, mesh, [Shard(0)]).to_local(), rows=16)
    assert_same_parameters(model, expected)


@on_processes
def test_ranks_outside_of_the_mesh_run_the_same_lines() -> None:
    expected, expected_losses = on_one_device()
    mesh = DeviceMesh("cpu", [1, 3], mesh_dim_names=("dp",))
    model = shard(new_model(), mesh)
    losses = train(model, lambda tokens: distribute_tensor(tokens, mesh, [Shard(0)]))
    assert losses[-1].shape == ()
    if dist.get_rank() in (1, 3):
        torch.testing.assert_close(full(losses[-1]), expected_losses[-1], atol=1e-4, rtol=1e-4)
        assert_same_parameters(model, expected)
    else:
        assert all(parameter.to_local().numel() == 0 for parameter in model.parameters())


def test_uneven_shards_over_both_axes() -> None:
    def new() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 37), nn.GELU(), nn.Linear(37, 5))

    x = torch.randn(13, 6)
    expected = new()
    expected(x).square().mean().backward()
    with mesh_of(4, 2, names=("dp", "tp")) as mesh:
        model = new()
        keep = {"use_local_output": False}
        parallelize_module(model, mesh, {"0": ColwiseParallel(**keep), "2": RowwiseParallel(**keep)})
        fully_shard(model, mesh=mesh["dp"])
        assert [shard.shape[0] for shard in model[0].weight.shards.values()] == [5, 5, 5, 5, 5, 5, 4, 3]
        model(distribute_tensor(x, mesh, [Shard(0), Replicate()])).square().mean().backward()
        for parameter, wanted in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(full(parameter.grad), wanted.grad)
