"""The global size of a local input, from the sizes of the outputs that other modules returned."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise import Replicate, Shard, distribute_tensor, init_device_mesh
from shardwise.errors import ShapeError
from shardwise.parallel import RowwiseParallel, SequenceParallel, parallelize_module
from shardwise.parallel.sizes import OutputSizes, _ambiguous, _local_size
from tests.processes.pool import on_processes


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_sizes_are_ambiguous_where_some_rank_has_equal_shards(ranks) -> None:
    for size in range(20):
        for other in range(20):
            shards = [(_local_size(size, ranks, rank), _local_size(other, ranks, rank)) for rank in range(ranks)]
            assert _ambiguous(size, other, ranks) == (size != other and any(a == b for a, b in shards))


def test_sizes_are_forgotten_after_many_later_outputs(monkeypatch) -> None:
    monkeypatch.setattr("shardwise.parallel.sizes._RECENT", 3)
    sizes, key, other = OutputSizes(), (None, 3, 1), (None, 3, 0)
    for size in range(100):
        sizes.add(key, size)
    assert sizes.recent(key) == [97, 98, 99]
    assert sizes.latest(key) == 99
    assert len(sizes._last[key]) <= 6
    for _ in range(3):
        sizes.add(other, 5)
    assert sizes.recent(key) == []
    assert sizes.latest(key) == 99


def block(axis: str) -> tuple[nn.Module, nn.Module]:
    """A linear and a norm, on a mesh of which no other test knows: processes, and their sizes, outlive a test."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=(axis,))
    style = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    linear = parallelize_module(nn.Linear(8, 8), mesh, style)
    return linear, parallelize_module(nn.LayerNorm(8), mesh, SequenceParallel())


@on_processes
def test_a_shard_of_no_recorded_size_is_an_error() -> None:
    linear, norm = block("a")
    for length in (8, 16):
        assert norm(linear(torch.randn(2, length, 8))).shape == (2, length, 8)
    with pytest.raises(ShapeError) as caught:
        norm(torch.randn(2, 3, 8))
    assert str(caught.value) == (
        "cannot infer the global size of dim 1: the local size is 3, and no tensor sharded over mesh(a=4) has such a "
        "shard on this rank (their sizes: [8, 16]): pass a DTensor: DTensor.from_local(local, mesh, placements)"
    )
    dist.barrier()


@on_processes
def test_each_mesh_has_its_own_sizes() -> None:
    linear, norm = block("one")
    assert norm(linear(torch.randn(2, 8, 8))).shape == (2, 8, 8)
    other = init_device_mesh("cpu", (4,), mesh_dim_names=("other",))
    elsewhere = parallelize_module(nn.LayerNorm(8), other, SequenceParallel())
    local = distribute_tensor(torch.randn(2, 8, 8), other, [Shard(1)]).to_local()
    assert elsewhere(local).shape == (2, 8, 8)
    assert elsewhere(torch.randn(2, 3, 8)).shape == (2, 12, 8)  # its inputs come from elsewhere: it asks
