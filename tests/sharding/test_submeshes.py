"""Submeshes: `mesh["tp"]` has a parallel instance for each coordinate on the other axes, all run side by side.

Each instance gets a value of its own, so that a collective that reaches across instances shows.
"""

import itertools
import warnings

import pytest
import torch

from shardwise import (
    DeviceMesh,
    DTensor,
    Partial,
    RankTensor,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    rand,
    simulate,
)
from shardwise.testing import assemble, make_dtensor

ALL = [Shard(0), Shard(1), Replicate(), Partial(), Partial("max")]


@pytest.fixture
def mesh():
    with simulate(8):
        yield init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))


def flattened_by_name(mesh):
    mesh["dp", "cp"]._flatten("dp_cp")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer versions of PyTorch discourage it; programs do it all the same
        return mesh["dp_cp"]


SUBMESHES = {
    "first": lambda mesh: mesh["dp"],
    "middle": lambda mesh: mesh["cp"],
    "last": lambda mesh: mesh["tp"],
    "outer-two": lambda mesh: mesh["dp", "cp"],
    "inner-two": lambda mesh: mesh["cp", "tp"],
    "apart": lambda mesh: mesh["dp", "tp"],
    "all": lambda mesh: mesh["dp", "cp", "tp"],
    "flattened": lambda mesh: mesh["dp", "cp"]._flatten("dp_cp"),
    "flattened-by-name": flattened_by_name,
}


@pytest.fixture(params=SUBMESHES.values(), ids=SUBMESHES.keys())
def submesh(request, mesh):
    return request.param(mesh)


def instances(submesh):
    """The ranks of each parallel instance, in mesh order, found from names alone."""
    coordinates = list(itertools.product(range(2), repeat=3))
    names = {"dp": (0,), "cp": (1,), "tp": (2,), "dp_cp": (0, 1)}
    inside = [axis for name in submesh.mesh_dim_names for axis in names[name]]
    found = {}
    for rank, at in enumerate(coordinates):
        found.setdefault(tuple(at[axis] for axis in range(3) if axis not in inside), []).append(rank)
    return list(found.values())


def different_values(submesh, shape):
    """A value for each instance, as a RankTensor."""
    by_rank = [torch.empty(0)] * 8
    values = []
    for number, ranks in enumerate(instances(submesh)):
        values.append(torch.randint(-50, 50, shape).float() + 1000 * number)
        for rank in ranks:
            by_rank[rank] = values[-1]
    return RankTensor(by_rank), values


def check(x, values):
    for number, value in enumerate(values):
        assert torch.equal(assemble(x, instance=number), value)


@pytest.mark.parametrize("shape", [(4, 4), (5, 3)], ids=str)
def test_distribute_tensor(submesh, shape):
    per_rank, values = different_values(submesh, shape)
    for placements in itertools.product(ALL, repeat=submesh.ndim):
        check(distribute_tensor(per_rank, submesh, placements), values)
        check(distribute_tensor(per_rank, submesh, placements, src_data_rank=None), values)


@pytest.mark.parametrize("shape", [(4, 4), (5, 3)], ids=str)
def test_redistribute_and_full_tensor(submesh, shape):
    per_rank, values = different_values(submesh, shape)
    lists = list(itertools.product(ALL, repeat=submesh.ndim))
    step = {1: 1, 2: 7, 3: 301}[submesh.ndim]
    for number, source in enumerate(lists):
        x = make_dtensor(per_rank, submesh, source, seed=0)
        for target in lists[number % step :: step]:
            check(x.redistribute(placements=target), values)
        assert all(map(torch.equal, x.full_tensor().shards, per_rank.shards))


def test_from_local(submesh):
    # Uneven shards: the ranks of an instance exchange their shapes.
    per_rank, values = different_values(submesh, (7, 3))
    local = make_dtensor(per_rank, submesh, [Shard(0)] * submesh.ndim, seed=0).to_local()
    x = DTensor.from_local(local, submesh, [Shard(0)] * submesh.ndim, run_check=True)
    assert x.shape == (7, 3)
    check(x, values)


def test_instances_in_mesh_order(submesh):
    # The order in which shardwise lists instances is that of the coordinates on the axes left out.
    x = distribute_tensor(torch.zeros(4), submesh, [Replicate()] * submesh.ndim)
    assert x._spec.mesh_info.instances.flatten(1).tolist() == instances(submesh)


def test_random_numbers_are_the_same_on_every_instance(submesh):
    x = rand(6, 4, device_mesh=submesh, placements=[Shard(0)] * submesh.ndim)
    assert assemble(x).shape == (6, 4)  # all instances must agree


def test_instances_that_differ_are_told_apart(mesh):
    per_rank, _ = different_values(mesh["tp"], (4, 4))
    x = make_dtensor(per_rank, mesh["tp"], [Shard(0)], seed=0)
    with pytest.raises(AssertionError, match="another value"):
        assemble(x)


def test_gradients_stay_in_their_instance(submesh):
    per_rank, values = different_values(submesh, (5, 3))
    x = make_dtensor(per_rank, submesh, [Shard(0)] * submesh.ndim, seed=0).requires_grad_()
    weight, weights = different_values(submesh, (5, 3))
    (x.full_tensor() * weight).sum().backward()
    assert x.grad.placements == x.placements
    check(x.grad, weights)
    check(x, values)


def test_submeshes_share_a_tensor_by_hand(mesh):
    # Cut over tp, then the local parts over dp: two meshes, one after the other.
    value = torch.arange(16.0).view(4, 4)
    outer = distribute_tensor(value, mesh["tp"], [Shard(0)])
    inner = DTensor.from_local(outer.to_local(), mesh["dp"], [Replicate()]).redistribute(placements=[Shard(1)])
    for rank, (dp, _, tp) in enumerate(itertools.product(range(2), repeat=3)):
        assert torch.equal(inner.shards[rank], value[2 * tp : 2 * tp + 2, 2 * dp : 2 * dp + 2])


def test_a_mesh_may_leave_ranks_out():
    with simulate(4):
        part = distribute_tensor(torch.arange(4.0), DeviceMesh("cpu", [1, 3]), [Shard(0)])
        assert {rank: shard.tolist() for rank, shard in part.shards.items()} == {1: [0, 1], 3: [2, 3]}
