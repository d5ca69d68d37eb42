"""Errors of one device that PyTorch's meta kernels do not raise, and results that they would refuse."""

import pytest
import torch
import torch.nn.functional as F

from shardwise import Replicate, Shard, distribute_tensor
from tests.worlds import mesh_of

INTEGERS = torch.zeros(1, 1, dtype=torch.int64)
CALLS = {
    "softmax": (torch.randn(1, 1), lambda x: x.softmax(2)),
    "softmin": (torch.randn(1, 1), lambda x: F.softmin(x, 2)),
    "slice_scatter": (INTEGERS, lambda x: torch.slice_scatter(x.clone(), x.narrow(1, 0, 1), 1, 1, 2)),
    "bernoulli of bools": (torch.zeros(2, 2, dtype=torch.bool), torch.bernoulli),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
def test_the_error_of_one_device(placement, name):
    value, call = CALLS[name]
    with pytest.raises((IndexError, RuntimeError)) as plain:
        call(value)
    with mesh_of(2) as mesh, pytest.raises(plain.type):
        call(distribute_tensor(value, mesh, [placement]))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_layer_norm_in_bfloat16_over_a_sharded_dim(ranks):
    torch.manual_seed(0)
    plain = torch.randn(1, 4).bfloat16().requires_grad_()
    F.layer_norm(plain, [4]).square().sum().backward()
    with mesh_of(ranks) as mesh:
        x = distribute_tensor(plain.detach(), mesh, [Shard(1)]).requires_grad_()
        F.layer_norm(x, [4]).square().sum().backward()
        torch.testing.assert_close(x.grad.full_tensor().shards[0], plain.grad, rtol=0.05, atol=0.05)
