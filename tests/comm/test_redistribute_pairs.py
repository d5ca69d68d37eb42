"""Every placement to every other, on every mesh here, for even, uneven, small and empty sizes.

Tensors are built and put together again by `shardwise.testing`, which shares no code with redistribution.
"""

import itertools
import math
import random

import pytest
import torch

from shardwise import Partial, Replicate, Shard
from shardwise.testing import assemble, make_dtensor
from tests.worlds import mesh_of

SHAPES = {
    "even": (12, 4),
    "uneven": (5, 3),
    "smaller-than-the-mesh": (1, 2),
    "empty": (0, 4),
    "one-dim": (7,),
    "three-dims": (2, 5, 4),
}
OTHERS = [Replicate(), Partial(), Partial("max")]


def value_of(shape):
    return torch.randint(-50, 50, shape).float()


def check_pairs(mesh, value, pairs):
    """Redistribute each source to its targets; each source is made once and must come out untouched."""
    for source, targets in itertools.groupby(pairs, key=lambda pair: pair[0]):
        x = make_dtensor(value, mesh, source, seed=len(source))
        before = [shard.clone() for shard in x.shards.values()]
        for _, target in targets:
            y = x.redistribute(placements=target)
            assert y.placements == tuple(target)
            assert torch.equal(assemble(y), value), (source, target)
        assert all(map(torch.equal, x.shards.values(), before)), source


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("sizes", [(2,), (3,), (4,), (1, 2), (2, 2), (2, 3)], ids=str)
def test_every_pair(sizes, shape):
    cuts = [Shard(dim) for dim in range(len(shape))]
    lists = list(itertools.product([*cuts, *OTHERS], repeat=len(sizes)))
    pairs = itertools.product(lists, repeat=2)
    if len(lists) > 30:  # 36 x 36 placements of three dims: every 5th pair
        pairs = itertools.islice(pairs, 0, None, 5)
    with mesh_of(*sizes) as mesh:
        check_pairs(mesh, value_of(shape), pairs)


def triples():
    return list(itertools.product([Shard(0), Shard(1), Replicate(), Partial()], repeat=3))


@pytest.mark.parametrize("part", range(4))
def test_every_pair_on_three_axes(part):
    # 64 x 64 pairs, in four parts that run side by side.
    pairs = list(itertools.product(triples(), repeat=2))
    quarter = len(pairs) // 4
    with mesh_of(2, 2, 2) as mesh:
        check_pairs(mesh, value_of((4, 6)), pairs[part * quarter : (part + 1) * quarter])


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_sampled_pairs_on_three_axes(shape):
    cuts = [Shard(dim) for dim in range(len(shape))]
    lists = list(itertools.product([*cuts, *OTHERS], repeat=3))
    generator = random.Random(str(shape))
    sources = generator.sample(lists, 15)
    pairs = [(source, target) for source in sources for target in generator.sample(lists, 10)]
    with mesh_of(2, 2, 2) as mesh:
        check_pairs(mesh, value_of(shape), pairs)


@pytest.mark.parametrize("sizes", [(2,), (2, 3), (2, 2, 2)], ids=str)
def test_shards_are_slices_of_the_whole(sizes):
    # What assemble checks by index arithmetic, once more in plain terms: torch.chunk, axis by axis.
    value = torch.arange(math.prod((7, 6))).view(7, 6).float()
    with mesh_of(*sizes) as mesh:
        for placements in itertools.product([Shard(0), Shard(1), Replicate()], repeat=len(sizes)):
            x = make_dtensor(value, mesh, [Partial()] * len(sizes), seed=0).redistribute(placements=placements)
            for rank, at in enumerate(itertools.product(*map(range, sizes))):
                expected = value
                for axis, placement in enumerate(placements):
                    if placement.is_shard():
                        pieces = torch.chunk(expected, sizes[axis], placement.dim)
                        empty = expected.narrow(placement.dim, 0, 0)
                        expected = pieces[at[axis]] if at[axis] < len(pieces) else empty
                assert torch.equal(x.shards[rank], expected)
