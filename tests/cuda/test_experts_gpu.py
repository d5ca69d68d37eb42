"""Experts on a GPU: simulated ranks share it, and one NCCL rank shows what waits for the device."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from shardwise import Shard, distribute_module, distribute_tensor, init_device_mesh
from shardwise.comm import token_route
from shardwise.comm.groups import adopt
from shardwise.comm.token_route import ExpertAxis, route_rows
from shardwise.parallel import ExpertParallel, parallelize_module
from shardwise.world import simulate
from tests.parallel.mixtures import ChosenExperts, Mixture

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def one_rank() -> Iterator[None]:
    torch.cuda.set_device(0)  # DeviceMesh warns if nobody has chosen one
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_simulated_ranks(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    sizes = {"experts": 8, "width": 32, "hidden": 64}
    alone = Mixture("chosen", **sizes).cuda().to(dtype)
    x = torch.randn(29, 32, device="cuda", dtype=dtype)
    expected = alone(x)
    sum(map(torch.sum, expected)).backward()
    model = copy.deepcopy(alone)
    model.zero_grad()
    tolerance = 5e-2 if dtype is torch.bfloat16 else 1e-3
    with simulate(8):
        mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "ep"))
        parallelize_module(model, mesh, {"experts": ExpertParallel()})
        distribute_module(model, mesh)
        found = model(distribute_tensor(x, mesh, [Shard(0), Shard(0)]))
        sum(map(torch.sum, found)).backward()
        torch.testing.assert_close(found[0].full_tensor().shards[0], expected[0], rtol=tolerance, atol=tolerance)
        for mine, one in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor().shards[0], one.grad, rtol=tolerance, atol=4 * tolerance)


def waits(run: object) -> list[str]:
    """What made the host wait for the device while this ran."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()  # type: ignore[operator]
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return [str(warning.message) for warning in found if "called a synchronizing" in str(warning.message)]


@pytest.mark.usefixtures("one_rank")
def test_one_rank_waits_for_nothing() -> None:
    mesh = init_device_mesh("cuda", (1,), mesh_dim_names=("ep",))
    torch.manual_seed(0)
    experts = ChosenExperts(8, 32, 64).cuda().bfloat16()
    parallelize_module(experts, mesh, ExpertParallel())
    x = torch.randn(64, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weights, index = torch.rand(64, 8, device="cuda", dtype=torch.bfloat16).topk(2)

    def step() -> None:
        experts(x, index, weights).sum().backward()

    step()
    assert waits(step) == []


@pytest.mark.usefixtures("one_rank")
def test_a_route_waits_once() -> None:
    """With the exchange of several ranks, of which this is the only one: sizes are read once."""
    mesh_info = adopt(init_device_mesh("cuda", (1,), mesh_dim_names=("ep",)))
    axis = ExpertAxis(mesh_info, 0, 8)
    x = torch.randn(64, 32, device="cuda")
    index = torch.rand(64, 8, device="cuda").topk(2).indices

    returned: list[torch.Tensor] = []

    def route() -> None:
        order, starts = token_route._sorted_by_expert(index.flatten(), 8)
        known = token_route.route_known_rows(starts, starts.diff().view(1, 8), axis)
        assert known.sent == [128]
        rows = x[order // 2]
        returned[:] = rows, known.back(known.send(rows))

    route()
    assert len(waits(route)) == 1
    assert torch.equal(*returned)
    assert route_rows(index.flatten(), axis).sent is None  # one rank sends nothing
