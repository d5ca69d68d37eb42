"""PyTorch's placements, as kinds and fields."""

import pytest
import torch
import torch.distributed.tensor as theirs
from torch import nn
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard

import shardwise
from shardwise import distribute_tensor
from shardwise._torch.placements import torch_placement
from shardwise.parallel import ColwiseParallel, parallelize_module
from tests.worlds import mesh_of

PAIRS = [
    (theirs.Shard(0), shardwise.Shard(0)),
    (theirs.Shard(-2), shardwise.Shard(-2)),
    (theirs.Replicate(), shardwise.Replicate()),
    (theirs.Partial(), shardwise.Partial()),
    (theirs.Partial("max"), shardwise.Partial("max")),
    (_StridedShard(1, split_factor=3), shardwise.InterleavedShard(1, 3)),
]


def test_kinds_and_fields():
    assert [torch_placement(placement) for placement, _ in PAIRS] == [
        ("Shard", 0),
        ("Shard", -2),
        ("Replicate",),
        ("Partial", "sum"),
        ("Partial", "max"),
        ("InterleavedShard", 1, 3),
    ]
    assert torch_placement(_MaskPartial(offset_shape=(2,), offset_dim=0)) is None
    assert torch_placement(shardwise.Shard(0)) is torch_placement(0) is None


@pytest.mark.parametrize(("torch_one", "ours"), PAIRS, ids=repr)
def test_placements_equal_those_of_the_same_meaning(torch_one, ours):
    assert ours == torch_one
    assert (ours,) == (torch_one,)
    assert hash(ours) == hash(torch_one)
    assert {ours: 1}[torch_one if isinstance(torch_one, theirs.Shard) else ours] == 1
    if not isinstance(torch_one, _StridedShard):  # it says False to all classes that it does not know
        assert torch_one == ours
        assert (torch_one,) == (ours,)
        assert torch_one in [ours]
    for other_theirs, other in PAIRS:
        assert (ours == other_theirs) == (ours == other) == (ours is other)


def test_placements_of_pytorch_are_taken_as_ours():
    with mesh_of(2, 2) as mesh:
        value = torch.randn(8, 6)
        x = distribute_tensor(value, mesh, [theirs.Shard(0), theirs.Replicate()])
        assert x.placements == (theirs.Shard(0), theirs.Replicate())
        assert type(x.placements[0]) is shardwise.Shard
        y = x.redistribute(placements=[theirs.Replicate(), _StridedShard(1, split_factor=3)])
        assert y.placements == (shardwise.Replicate(), shardwise.InterleavedShard(1, 3))
        assert torch.equal(y.full_tensor(), value)
        style = ColwiseParallel(input_layouts=theirs.Shard(0), output_layouts=theirs.Replicate()).over("b")
        assert style.output_layouts[0] is shardwise.Replicate()
        model = parallelize_module(nn.Linear(6, 4), mesh, style)
        assert model.weight.placements == (theirs.Replicate(), theirs.Shard(0))
