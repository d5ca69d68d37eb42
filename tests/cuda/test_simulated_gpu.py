"""All simulated ranks share one GPU: the CUDA paths, without a cluster. Skipped where there is no GPU."""

from __future__ import annotations

import itertools
import os
import random

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import shardwise
from shardwise import (
    DTensor,
    InterleavedShard,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from tests.programs.training import PROGRAMS, expected_losses, losses

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def counting(shape=(8, 6), dtype=torch.float32) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape).to(dtype).cuda()


@pytest.mark.parametrize("shape", [(8, 6), (5, 3), (1, 2), (0, 4)])
def test_redistribute(shape) -> None:
    value = counting(shape)
    options = [Replicate(), Shard(0), Shard(1), Partial(), Partial("max")]
    with shardwise.simulate(4):
        mesh = init_device_mesh("cuda", (2, 2))
        pairs = list(itertools.product(options, repeat=4))
        for a, b, c, d in random.Random(0).sample(pairs, 120):
            x = distribute_tensor(value, mesh, [a, b])
            assert x.device.type == "cuda"
            assert torch.equal(x.redistribute(placements=[c, d]).full_tensor(), value), (a, b, c, d)


@pytest.mark.parametrize("dtype", [torch.int16, torch.bool, torch.bfloat16, torch.complex64, torch.float16])
def test_dtypes(dtype) -> None:
    value = counting((5, 4), dtype)
    with shardwise.simulate(4):
        mesh = init_device_mesh("cuda", (4,))
        for source, target in itertools.product([[Shard(0)], [Shard(1)], [InterleavedShard(1, 2)]], repeat=2):
            moved = distribute_tensor(value, mesh, source).redistribute(placements=target)
            assert torch.equal(moved.full_tensor(), value)


def test_gradients() -> None:
    value = counting((5, 6))
    with shardwise.simulate(4):
        mesh = init_device_mesh("cuda", (2, 2))
        x = distribute_tensor(value, mesh, [Shard(0), Shard(1)]).requires_grad_()
        (x.redistribute(placements=[Shard(1), Replicate()]).to_local() ** 2).sum().backward()
        assert x.grad.placements == (Shard(0), Shard(1))
        assert torch.equal(x.grad.full_tensor(), 2 * value)


def test_attention() -> None:
    """Both kernels of a GPU: that for bfloat16 and that for float32."""
    for dtype in (torch.bfloat16, torch.float32):
        q, k, v = (torch.randn(3, 4, 16, 32, device="cuda", dtype=dtype) for _ in range(3))
        for causal in (False, True):
            expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
            with shardwise.simulate(4):
                mesh = init_device_mesh("cuda", (2, 2))
                inputs = [distribute_tensor(t, mesh, [Shard(0), Shard(1)]).requires_grad_() for t in (q, k, v)]
                with shardwise.explicit():
                    result = F.scaled_dot_product_attention(*inputs, is_causal=causal)
                    result.sum().backward()
                torch.testing.assert_close(result.detach().full_tensor(), expected, rtol=2e-2, atol=2e-2)
                assert all(torch.isfinite(t.grad.full_tensor()).all() for t in inputs)


@pytest.mark.parametrize("name", PROGRAMS)
def test_training(name) -> None:
    program = PROGRAMS[name]
    with shardwise.simulate(4):
        mesh = init_device_mesh("cuda", (4,) if len(program.axes) == 1 else (2, 2), mesh_dim_names=program.axes)
        assert losses(program, mesh) == pytest.approx(expected_losses("cuda"), abs=1e-3)


def test_nccl_with_one_rank(tmp_path) -> None:
    """A real NCCL world, as large as one GPU allows."""
    os.environ.setdefault("LOCAL_RANK", "0")
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cuda", (1,))
        x = distribute_tensor(counting(), mesh, [Shard(0)]).requires_grad_()
        y = DTensor.from_local(x.to_local() * 2, mesh, [Partial()]).redistribute(placements=[Shard(1)], async_op=True)
        y.sum().backward()
        assert torch.equal(y.full_tensor(), 2 * counting())
        assert torch.equal(x.grad.full_tensor(), torch.full_like(counting(), 2.0))
    finally:
        dist.destroy_process_group()
