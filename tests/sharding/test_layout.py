"""Which elements a rank holds, against cutting a real tensor with torch.chunk, rank by rank."""

import itertools
import random

import pytest
import torch

from shardwise import InterleavedShard, Replicate, Shard, ShardOrderEntry
from shardwise.errors import LayoutError
from shardwise.sharding.from_placements import default_order, from_placements, sharding_sequence, to_placements
from shardwise.sharding.layout import chunk_range
from shardwise.sharding.placement import AnyShard

MESHES = [(2,), (3,), (4,), (5,), (1, 2), (2, 2), (2, 3), (3, 2), (2, 2, 2), (2, 1, 3)]


def chunk(tensor, dim, pieces, index):
    """Piece `index` of torch.chunk, which leaves out empty pieces at the end."""
    found = torch.chunk(tensor, pieces, dim)
    return found[index] if index < len(found) else tensor.narrow(dim, 0, 0)


def cut_by_hand(tensor, mesh, placements, sequence, at):
    """The shard of the rank at a coordinate: one torch.chunk after the other."""
    for axis in sequence:
        placement = placements[axis]
        if isinstance(placement, InterleavedShard):
            blocks = torch.chunk(tensor, placement.blocks, placement.dim)
            tensor = torch.cat([chunk(block, placement.dim, mesh[axis], at[axis]) for block in blocks], placement.dim)
        elif placement.is_shard():
            tensor = chunk(tensor, placement.dim, mesh[axis], at[axis])
    return tensor


def check_every_rank(mesh, shape, placements, order=None):
    order = default_order(placements) if order is None else order
    layout = from_placements(mesh, shape, placements, order)
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    numels = []
    for at in itertools.product(*map(range, mesh)):
        shard = cut_by_hand(whole, mesh, placements, sharding_sequence(len(mesh), order), at)
        assert layout.local_shape(at) == shard.shape
        held = whole
        for dim, runs in enumerate(layout.runs(at)):
            index = [i for start, stop in runs for i in range(start, stop)]
            held = held.index_select(dim, torch.tensor(index, dtype=torch.long))
            # The offset is where the first element sits; a rank without elements is at the end.
            assert layout.offset(at)[dim] == (index[0] if index else shape[dim])
        assert torch.equal(held, shard)
        numels.append(shard.numel())
    assert layout.max_local_numel() == max(numels)
    if layout.is_even():
        assert len(set(numels)) == 1
    return layout


@pytest.mark.parametrize("pieces", range(1, 9))
def test_chunk_range_is_torch_chunk(pieces):
    for size in range(20):
        for index in range(pieces):
            start, stop = chunk_range(0, size, pieces, index)
            assert torch.equal(torch.arange(start, stop), chunk(torch.arange(size), 0, pieces, index))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_plain_cuts(mesh):
    # Every list of plain placements, for sizes that divide, do not divide, are smaller than the mesh, or are empty.
    for shape in [(8, 12), (7, 5), (1, 2), (0, 3), (13, 6)]:
        for placements in itertools.product([Shard(0), Shard(1), Replicate()], repeat=len(mesh)):
            check_every_rank(mesh, shape, placements)


@pytest.mark.parametrize("mesh", [mesh for mesh in MESHES if len(mesh) > 1], ids=str)
@pytest.mark.parametrize("size", [0, 1, 5, 8, 12, 13])
def test_several_axes_on_one_dim_in_any_order(mesh, size):
    placements = [Shard(0)] * len(mesh)
    for axes in itertools.permutations(range(len(mesh))):
        check_every_rank(mesh, (size, 2), placements, (ShardOrderEntry(0, axes),))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_interleaved_cuts(mesh):
    # Sampled: plain and interleaved cuts mixed, in any order. Some are refused; those that are not must be right.
    generator = random.Random(str(mesh))
    checked = 0
    for _ in range(200):
        shape = (generator.choice([0, 1, 2, 4, 6, 8, 9, 12, 24]), generator.choice([1, 3, 4, 6]))
        choices = [Replicate(), Shard(0), Shard(1), InterleavedShard(0, 2), InterleavedShard(0, 3)]
        placements = [generator.choice([*choices, InterleavedShard(1, 2)]) for _ in mesh]
        order = tuple(
            ShardOrderEntry(dim, tuple(generator.sample(axes, len(axes))))
            for dim in range(2)
            if (
                axes := [
                    axis
                    for axis, placement in enumerate(placements)
                    if isinstance(placement, AnyShard) and placement.dim == dim
                ]
            )
        )
        try:
            check_every_rank(mesh, shape, placements, order)
        except LayoutError:
            assert any(isinstance(placement, InterleavedShard) for placement in placements)
            continue
        checked += 1
    assert checked > 60


@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_one_interleaved_axis_takes_any_rank_count(blocks, ranks):
    # Blocks of 12 / blocks rows, cut unevenly or into nothing where the ranks do not divide them.
    check_every_rank((ranks,), (12,), [InterleavedShard(0, blocks)])


def test_blocks_that_do_not_divide_are_refused():
    with pytest.raises(LayoutError, match="blocks"):
        from_placements((2,), (7,), [InterleavedShard(0, 2)])


@pytest.mark.parametrize("mesh", [(2,), (2, 2), (2, 3), (2, 2, 2)], ids=str)
def test_placements_survive_the_round_trip(mesh):
    # to_placements may find another list for the same cut, but it must mean the same layout.
    for shape in [(8, 12), (7, 5), (1, 2), (0, 3)]:
        for placements in itertools.product(
            [Shard(0), Shard(1), Replicate(), InterleavedShard(1, 2)], repeat=len(mesh)
        ):
            try:
                layout = from_placements(mesh, shape, placements, default_order(placements))
            except LayoutError:
                continue
            said = to_placements(layout)
            if said is not None:
                assert from_placements(mesh, shape, *said) is layout
            else:
                assert any(isinstance(placement, InterleavedShard) for placement in placements)


def test_equal_layouts_are_one_object():
    # An interleave of blocks of one row cuts what a plain shard cuts.
    plain = from_placements((2,), (8, 4), [Shard(0)])
    assert from_placements((2,), (8, 4), [Shard(0)]) is plain
    assert from_placements((2,), (8, 4), [InterleavedShard(0, 1)]) is plain
    assert from_placements((2,), (8, 4), [InterleavedShard(0, 2)]) is not plain
