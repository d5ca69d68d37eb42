"""dp x tp: the recommended way, PyTorch's way on mesh["tp"], and local outputs on a mesh of two axes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise import (
    DTensor,
    P,
    RankTensor,
    Replicate,
    Shard,
    bucket_gradients,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
    simulate,
)
from shardwise.debug import CommDebugMode
from shardwise.errors import InputError, MeshError
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from tests.parallel.models import Attention, Half, counts, first, made
from tests.processes.pool import on_processes

ATTENTION_PLAN = {
    "inner.[qkv]": ColwiseParallel(use_local_output=False),
    "inner.o": RowwiseParallel(use_local_output=False),
}
LOCAL = {"norm": "replicate", "inner.[qkv]": "colwise", "inner.o": "rowwise"}


def alone(x):
    model = made(lambda: Half(Attention()))
    loss = model(x).square().mean()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def same_gradients(model, expected) -> None:
    for name, parameter in model.named_parameters():
        assert parameter.grad.placements == parameter.placements
        torch.testing.assert_close(first(parameter.grad), expected[name], msg=lambda text, name=name: f"{name}: {text}")


def recommended(mesh) -> None:
    x = torch.randn(5, 6, 16)  # 5 rows over 2: unevenly
    loss, gradients = alone(x)
    model = distribute_module(parallelize_module(made(lambda: Half(Attention())), mesh, ATTENTION_PLAN), mesh)
    got = model(distribute_tensor(x, mesh, P("dp"))).square().mean()
    assert got.item() == pytest.approx(loss, rel=1e-5)
    with CommDebugMode() as comm:
        got.backward(retain_graph=True)
    same_gradients(model, gradients)
    over = sorted(c.over for c in comm.collectives)
    assert over == sorted(set(over)), comm.collectives  # one for each group
    with CommDebugMode() as comm, bucket_gradients(None):
        got.backward()
    assert counts(comm) == {"all_reduce": len(gradients)}  # each parameter once


def test_the_recommended_way() -> None:
    with simulate(8):
        recommended(init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp")))


@on_processes
def test_the_recommended_way_on_processes() -> None:
    other = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))  # its axis has the same group as (dp, tp) below
    distribute_tensor(torch.ones(4), other, [Shard(0)])
    recommended(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))


def test_the_style_s_axis_may_come_first() -> None:
    with simulate(8):
        recommended(init_device_mesh("cpu", (4, 2), mesh_dim_names=("tp", "dp")))


@pytest.mark.parametrize("names", [("dp", "tp"), ("tp", "dp")])
def test_local_outputs_are_distributed_over_the_other_axes(names) -> None:
    x = torch.randn(4, 6, 16)
    loss, gradients = alone(x)
    with simulate(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        model = parallelize_module(made(lambda: Half(Attention())), mesh, LOCAL)
        out = model(distribute_tensor(x, mesh["dp"], [Shard(0)]))
        assert out.device_mesh == mesh["dp"]
        assert out.placements == (Shard(0),)
        assert model.inner.q(distribute_tensor(x, mesh, P("dp"))).shape == (4, 6, 8)  # half of the features
        got = out.square().mean()
        assert got.item() == pytest.approx(loss, rel=1e-5)
        got.backward()
        same_gradients(model, gradients)


def test_each_dp_rank_its_own_program_as_in_pytorch() -> None:
    batches = [torch.randn(3, 6, 16) for _ in range(2)]
    expected = [alone(x) for x in batches]
    with simulate(8):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        model = parallelize_module(made(lambda: Half(Attention())), mesh["tp"], LOCAL)
        loss = model(RankTensor([batches[rank // 4] for rank in range(8)])).square().mean()
        loss.backward()
        for rank in range(8):
            assert loss.shards[rank].item() == pytest.approx(expected[rank // 4][0], rel=1e-5)
            for name, parameter in model.named_parameters():
                whole = parameter.grad.full_tensor().shards[rank]
                torch.testing.assert_close(whole, expected[rank // 4][1][name])


def test_errors() -> None:
    with simulate(8):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        linear = parallelize_module(nn.Linear(8, 8), mesh, ColwiseParallel())
        with pytest.raises(InputError, match=r"the placements on the other axes are not known: distribute the model's"):
            linear(torch.randn(2, 8))
        uneven = parallelize_module(nn.Linear(8, 6), mesh, ColwiseParallel())
        with pytest.raises(InputError, match=r"differ in size.*use_local_output=False"):
            uneven(distribute_tensor(torch.randn(2, 8), mesh, P("dp")))
        line = parallelize_module(nn.Linear(8, 8), mesh["tp"], ColwiseParallel())
        with pytest.raises(MeshError, match=r"parallelized over mesh\(tp=4\) got an input .* on mesh\(dp=2, tp=4\)"):
            line(distribute_tensor(torch.randn(2, 8), mesh, P("dp")))


def test_parameters_are_replicated_over_the_other_axes() -> None:
    with simulate(8):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        linear = parallelize_module(nn.Linear(8, 8), mesh, RowwiseParallel())
        assert isinstance(linear.weight, DTensor)
        assert linear.weight.placements == (Replicate(), Shard(1))
        assert linear.bias.placements == (Replicate(), Replicate())
