"""fully_shard on a GPU: the collectives of NCCL, memory that is freed, parameters in host memory."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise import Shard, distribute_tensor, init_device_mesh
from shardwise.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from tests.worlds import fake_group

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def mesh(tmp_path: object) -> Iterator[DeviceMesh]:
    """One rank, with NCCL for tensors on the GPU and gloo for those of the host."""
    store = dist.FileStore(f"{tmp_path}/store", 1)
    torch.cuda.set_device(0)  # DeviceMesh warns if nobody has chosen one
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    yield init_device_mesh("cuda", (1,), mesh_dim_names=("dp",))
    dist.destroy_process_group()


def model_of(dim: int = 256, blocks: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(dim, dim), nn.GELU()) for _ in range(blocks))).cuda()


def shard(model: nn.Sequential, mesh: DeviceMesh, **options: object) -> nn.Sequential:
    for block in model:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def train(model: nn.Module, x: torch.Tensor) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(4):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("offload", [False, True])
def test_training_on_nccl(mesh: DeviceMesh, distributed: bool, offload: bool) -> None:
    expected = model_of()
    model = copy.deepcopy(expected)
    x = torch.randn(8, 256, device="cuda")
    train(expected, x)
    shard(model, mesh, **({"offload_policy": CPUOffloadPolicy()} if offload else {}))
    train(model, distribute_tensor(x, mesh, [Shard(0)]) if distributed else x)
    for parameter, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        assert parameter.device.type == ("cpu" if offload else "cuda")
        torch.testing.assert_close(parameter.to_local().cuda(), wanted.detach(), atol=1e-4, rtol=1e-4)


def test_mixed_precision_on_nccl(mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = shard(model_of(), mesh, mp_policy=policy)
    train(model, torch.randn(8, 256, device="cuda"))
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_a_rank_holds_its_share_and_two_blocks() -> None:
    """Rank 0 of 8, on a group that moves nothing: what the allocator says."""
    dim, blocks, ranks = 1024, 8, 8
    with fake_group(ranks), torch.no_grad():
        mesh = init_device_mesh("cuda", (ranks,), mesh_dim_names=("dp",))
        elsewhere = torch.cuda.memory_allocated()
        model = model_of(dim, blocks)
        of_block = sum(parameter.nbytes for parameter in model[0].parameters())
        shard(model, mesh)
        share = torch.cuda.memory_allocated() - elsewhere
        assert share < blocks * of_block / ranks * 1.01
        x = torch.ones(1, dim, device="cuda")
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            model(x)
        assert torch.cuda.max_memory_allocated() - elsewhere < share + 2 * of_block * 1.01 + (1 << 20)
        assert torch.cuda.memory_allocated() - elsewhere < share + (1 << 20)
