"""Changes of mesh on a GPU: simulated ranks that share it, and a group of NCCL that its members make alone."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise import Partial, Replicate, Shard, distribute_tensor, simulate, transfer
from shardwise._torch.c10d import group_of_members
from shardwise.testing import assemble
from shardwise.transferring import Part
from tests.transferring.models import fully_sharded, tensor_parallel, weights

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("second", [[[4, 5], [6, 7]], [[2, 3], [4, 5]]], ids=str)
def test_simulated_ranks(second: list[list[int]]) -> None:
    torch.cuda.set_device(0)
    with simulate(8):
        trainer = DeviceMesh("cuda", [0, 1, 2, 3], mesh_dim_names=("fsdp",))
        generator = DeviceMesh("cuda", second, mesh_dim_names=("dp", "tp"))
        plain = weights()
        state = fully_sharded(plain, trainer)
        found = transfer(state, generator, tensor_parallel, dtype=torch.bfloat16, bucket_bytes=4096)
        for name, value in plain.items():
            assert found[name].device.type == "cuda"
            assert torch.equal(assemble(found[name]).cpu(), value.bfloat16())
        half = [Part("q", 0), Part("q", 1)]
        two = {"a": state["layers.0.k.weight"], "b": state["layers.0.v.weight"]}
        fused = transfer(two, generator, tensor_parallel, convert=lambda name: half["ab".index(name)])
        expected = torch.cat([plain["layers.0.k.weight"], plain["layers.0.v.weight"]])
        assert torch.equal(assemble(fused["q"]).cpu(), expected)
        x = distribute_tensor(plain["embed.weight"], trainer, [Partial()]).requires_grad_()
        x.redistribute(generator, [Replicate(), Shard(1)]).square().sum().backward()
        torch.testing.assert_close(assemble(x.grad).cpu(), 2 * plain["embed.weight"])


def test_meshes_of_two_kinds_of_devices() -> None:
    with simulate(4):
        host, device = DeviceMesh("cpu", [0, 1]), DeviceMesh("cuda", [1, 2, 3])
        value = torch.randn(6, 4)
        x = distribute_tensor(value, host, [Shard(0)])
        y = x.redistribute(device, [Shard(1)])
        assert y.device.type == "cuda"
        assert torch.equal(assemble(y).cpu(), value)
        assert torch.equal(assemble(y.redistribute(host, [Replicate()])), value)
        assert torch.equal(assemble(transfer({"x": x}, device, [Shard(1)])["x"]).cpu(), value)


@pytest.mark.parametrize("bound", [False, True])
def test_a_group_of_nccl_is_made_by_its_members(tmp_path: object, bound: bool) -> None:
    """Also where the default group is bound to a device, whose communicator PyTorch would split with all ranks."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    store = dist.FileStore(f"{tmp_path}/store", 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device if bound else None)
    try:
        made = group_of_members([0], "members")
        got = torch.ops._c10d_functional.all_to_all_single(torch.ones(3, device=device), [3], [3], made.group_name)
        assert torch.ops._c10d_functional.wait_tensor(got).tolist() == [1, 1, 1]
        assert dist.group.WORLD.bound_device_id == (device if bound else None)
    finally:
        dist.destroy_process_group()
