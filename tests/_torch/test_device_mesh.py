"""What shardwise reads of a DeviceMesh beyond its public names. A failure names what PyTorch has changed."""

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise import init_device_mesh
from shardwise._torch.device_mesh import (
    MeshOfOthers,
    flattened_meshes,
    has_groups,
    innermost_mesh,
    mesh_without_groups,
    parallel_instances,
    root_mesh,
)
from tests.worlds import mesh_of


@pytest.fixture
def mesh():
    with mesh_of(2, 4, names=("dp", "tp")) as mesh:
        yield mesh


def test_innermost_mesh(mesh):
    assert innermost_mesh() is None
    with mesh:
        assert innermost_mesh() is mesh
        with mesh["tp"] as submesh:
            assert innermost_mesh() is submesh
    assert innermost_mesh() is None


def test_parallel_instances(mesh):
    assert parallel_instances(mesh).tolist() == [[[0, 1, 2, 3], [4, 5, 6, 7]]]
    assert parallel_instances(mesh["tp"]).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert parallel_instances(mesh["dp"]).tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_root_mesh(mesh):
    assert root_mesh(mesh) is mesh
    assert root_mesh(mesh["tp"]) is mesh


def test_flattened_meshes(mesh):
    assert flattened_meshes(mesh) == []
    flat = mesh._flatten("all")
    assert flattened_meshes(mesh) == [flat]
    assert flattened_meshes(mesh["tp"]) == [flat]


def test_a_mesh_without_groups(mesh):
    bare = mesh_without_groups("cpu", mesh.mesh, ("dp", "tp"), rank=0)
    assert isinstance(bare, DeviceMesh)
    assert torch.equal(bare.mesh, mesh.mesh)
    assert bare == mesh
    assert not has_groups(bare)
    assert has_groups(mesh)
    assert has_groups(mesh["tp"])
    assert has_groups(init_device_mesh("cpu", (8,)))


def test_a_mesh_of_other_ranks(mesh):
    others = MeshOfOthers("cpu", torch.tensor([[[4, 5], [6, 7]]]), ("dp", "tp"))  # this process is rank 0
    assert others.mesh.tolist() == [[4, 5], [6, 7]]
    assert tuple(others.get_coordinate()) == (0, 0)
    assert not has_groups(others)
    assert parallel_instances(others["tp"]).tolist() == [[4, 5], [6, 7]]
    assert parallel_instances(others["dp"]).tolist() == [[4, 6], [5, 7]]
    assert others["dp"].mesh.tolist() == [4, 6]
    assert root_mesh(others["tp"]) is others
    assert others["dp", "tp"] is others
    again = MeshOfOthers("cpu", torch.tensor([[[4, 5], [6, 7]]]), ("dp", "tp"))
    assert others == again
    assert hash(others["tp"]) == hash(again["tp"])
    assert others["tp"] != MeshOfOthers("cpu", torch.tensor([[4, 5]]), ("tp",))
    assert others != mesh
    with pytest.raises(KeyError, match="pp"):
        others["pp"]
