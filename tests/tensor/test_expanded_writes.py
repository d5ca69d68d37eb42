"""Writes to views of expanded tensors: an element that is repeated is one element in memory, on whatever rank it is."""

import pytest
import torch

from shardwise import Replicate, Shard, distribute_tensor
from tests.worlds import mesh_of

BASES = [([3.0], (3, 3)), ([3.0, 4.0, 5.0], (3, 3)), ([[3.0], [4.0], [5.0]], (3, 3)), ([[3.0, 4.0, 5.0]], (4, 3))]
VIEWS = {
    "diagonal": lambda x: x.diagonal(),
    "upper": lambda x: x.diagonal(1),
    "lower": lambda x: x.diagonal(-1),
    "row": lambda x: x[1],
    "column": lambda x: x.t()[1],
    "corner": lambda x: x[1:, 1:],
    "element": lambda x: x[1, 1],
    "two views": lambda x: x.t().diagonal(1),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=str)
def test_a_write_to_one_is_a_write_to_all(placement, view):
    look = VIEWS[view]
    with mesh_of(4) as mesh:
        for values, shape in BASES:
            plain = torch.tensor(values)
            base = distribute_tensor(plain.clone(), mesh, [placement])
            expanded, expected = torch.broadcast_to(base, shape), plain.expand(shape)
            looked = look(expanded)
            look(expected).fill_(7)
            looked.fill_(7)
            for found, one_device in ((base, plain), (expanded, expected), (looked, look(expected))):
                assert torch.equal(found.full_tensor().shards[0], one_device)
