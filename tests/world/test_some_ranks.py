"""Meshes of some of the simulated ranks: the others hold nothing of their tensors, and take no part in their ops."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor, simulate, zeros
from shardwise._torch.device_mesh import MeshOfOthers
from shardwise.debug import CommDebugMode
from shardwise.errors import ShardwiseError
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from shardwise.testing import assemble
from shardwise.world import RankTensor, map_ranks

MESHES = {
    "without rank 0": lambda: DeviceMesh("cpu", [5, 2, 7], mesh_dim_names=("tp",)),
    "with rank 0": lambda: DeviceMesh("cpu", [[0, 3], [1, 6]], mesh_dim_names=("dp", "tp")),
    "without groups": lambda: MeshOfOthers("cpu", torch.arange(4, 8).view(1, 2, 2), ("dp", "tp")),
    "a slice": lambda: MeshOfOthers("cpu", torch.arange(4, 8).view(1, 2, 2), ("dp", "tp"))["tp"],
}


@pytest.fixture(params=MESHES)
def mesh(request):
    with simulate(8):
        yield MESHES[request.param]()


def ranks_of(mesh):
    return [2, 5, 7] if mesh.size() == 3 else [0, 1, 3, 6] if 0 in mesh.mesh else [4, 5, 6, 7]


def test_tensors_have_shards_on_the_ranks_of_the_mesh(mesh):
    whole = torch.arange(30.0).view(5, 6)
    for placement in (Shard(0), Shard(1), Replicate(), Partial()):
        x = distribute_tensor(whole, mesh, [placement] * mesh.ndim)
        assert sorted(x.shards) == ranks_of(mesh)
        assert torch.equal(assemble(x), whole)
        assert x.sum().item() == whole.sum()
    assert zeros(4, device_mesh=mesh, placements=[Shard(0)] * mesh.ndim).shape == (4,)


def test_ops_equal_one_device(mesh):
    one, other = torch.randn(5, 6), torch.randn(6, 7)
    x, y = (distribute_tensor(value, mesh, [Shard(0)] * mesh.ndim) for value in (one, other))
    with CommDebugMode() as comm:
        for _ in range(2):  # planned, and from the hot path
            for found, expected in (
                (x @ y, one @ other),
                (x.sort(0).values, one.sort(0).values),
                (x[1:4], one[1:4]),
                (F.layer_norm(x, (6,)), F.layer_norm(one, (6,))),
                (x.cumsum(0), one.cumsum(0)),
                (x.view(-1), one.view(-1)),
                (torch.cat([x, x]), torch.cat([one, one])),
            ):
                torch.testing.assert_close(assemble(found), expected)
    assert comm.get_total_bytes() > 0


def test_local_tensors(mesh):
    """A local tensor of all ranks gives the mesh those of its ranks; the others get no gradient."""
    local = map_ranks(lambda rank: torch.full((2,), float(rank))).requires_grad_()
    x = DTensor.from_local(local, mesh, [Shard(0)] * mesh.ndim)
    assert [int(shard[0]) for shard in x.shards.values()] == ranks_of(mesh)
    (x * 2).sum().backward()
    assert [int(shard.sum()) for shard in local.grad.shards] == [4 * (rank in ranks_of(mesh)) for rank in range(8)]
    assert len(x.to_local().shards) == mesh.size() * (2 if mesh.ndim == 1 and 4 in ranks_of(mesh) else 1)


@pytest.mark.parametrize("how", ["replicated", "styles"])
def test_training(mesh, how):
    def made():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))

    model, reference, data = made(), made(), torch.randn(5, 6)
    if how == "styles":
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        given = data
    else:
        distribute_module(model, mesh)
        given = distribute_tensor(data, mesh, [Shard(0)] * mesh.ndim)
    for net, x in ((reference, data), (model, given)):
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            net(x).sum().backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
    for ours, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(assemble(ours.detach()), expected.detach())


def test_tensors_of_different_meshes_do_not_meet():
    with simulate(4):
        one, other = (
            distribute_tensor(torch.ones(4), DeviceMesh("cpu", ranks, mesh_dim_names=("tp",)), [Shard(0)])
            for ranks in ([0, 1], [2, 3])
        )
        with pytest.raises(ShardwiseError, match="mesh"):
            one + other
        with pytest.raises(ShardwiseError, match="of 2 and 4 ranks"):
            one.to_local() + map_ranks(lambda rank: torch.ones(2))
        assert isinstance(one.to_local(), RankTensor)
