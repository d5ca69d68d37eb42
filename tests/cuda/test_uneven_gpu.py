"""A vocabulary that does not divide, on a GPU that simulated ranks share: padded or exchanged, and its loss."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import shardwise
from shardwise import CostModel, Partial, Replicate, Shard, distribute_tensor, init_device_mesh, plan

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("latency", [{"p2p_latency": 10.0}, {"latency": 10.0, "p2p_latency": 0.0}], ids=str)
@pytest.mark.parametrize("dim", [0, 1])
def test_gathers_and_sums_equal_one_device(latency: dict[str, float], dim: int) -> None:
    value = torch.randn(5025, 501, device="cuda")
    with shardwise.simulate(8), shardwise.using_cost_model(CostModel(**latency)):
        mesh = init_device_mesh("cuda", (8,))
        x = distribute_tensor(value, mesh, [Shard(dim)]).requires_grad_()
        gathered = x.redistribute(placements=[Replicate()])
        assert torch.equal(gathered.full_tensor(), value)
        summed = gathered.redistribute(placements=[Partial()]).redistribute(placements=[Shard(dim)])
        torch.testing.assert_close(summed.full_tensor(), value)
        (summed * 2).sum().backward()
        assert torch.equal(x.grad.full_tensor(), torch.full_like(value, 2.0))


def test_the_default_model_keeps_native_collectives() -> None:
    with shardwise.simulate(8):
        mesh = init_device_mesh("cuda", (8,))
        x = distribute_tensor(torch.zeros(50257, 64, device="cuda"), mesh, [Shard(0)])
        steps = plan(x.spec, x.spec.with_placements([Replicate()])).plan.steps
        assert [(step.kind, step.is_padded) for step in steps] == [("all-gather", True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_cross_entropy_of_sharded_classes(dtype: torch.dtype, reduction: str) -> None:
    scores = torch.randn(64, 5025, device="cuda", dtype=dtype)
    target = torch.randint(0, 5025, (64,), device="cuda")
    target[3] = -100
    plain = scores.clone().requires_grad_()
    expected = F.cross_entropy(plain, target, reduction=reduction)
    expected.backward()
    rough = {"rtol": 3e-2, "atol": 1e-3} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    with shardwise.simulate(4):
        mesh = init_device_mesh("cuda", (4,))
        x = distribute_tensor(scores, mesh, [Shard(1)]).requires_grad_()
        loss = F.cross_entropy(x, distribute_tensor(target, mesh, [Replicate()]), reduction=reduction)
        loss.backward()
        torch.testing.assert_close(loss.full_tensor(), expected.detach(), **rough)
        torch.testing.assert_close(x.grad.full_tensor(), plain.grad, **rough)
