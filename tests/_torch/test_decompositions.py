"""PyTorch's own decompositions of ops, as `_torch.decompositions` relies on them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._decomp import decomposition_table, register_decomposition

from shardwise import Partial, Replicate, Shard
from shardwise._torch.decompositions import pytorch_decomposition, registered_decomposition
from shardwise.ops.served import served_by
from tests.ops.helpers import no_communication, on, ranks, whole

aten = torch.ops.aten


def test_the_table_of_decompositions_holds_the_ops_that_are_taken_from_it() -> None:
    x = torch.arange(24.0).view(1, 6, 2, 2)
    assert torch.equal(pytorch_decomposition(aten.channel_shuffle.default)(x, 2), aten.channel_shuffle.default(x, 2))
    a, b = torch.rand(3, 4), torch.rand(5, 4)
    torch.testing.assert_close(pytorch_decomposition(aten._euclidean_dist.default)(a, b), aten._euclidean_dist(a, b))
    assert aten._unsafe_masked_index.default in decomposition_table
    assert aten._unsafe_masked_index_put_accumulate.default in decomposition_table


def test_an_op_of_ones_own_is_decomposed_as_it_is_registered() -> None:
    a, b = torch.randn(4, 6), torch.randn(6, 4)
    with torch.library._scoped_library("shardwise_decomposed", "FRAGMENT") as library, ranks(2, 2) as mesh:
        for name in ("outer", "inner"):
            library.define(f"{name}(Tensor x, Tensor y) -> Tensor")
            torch.library.impl(library, name, "CPU")(lambda x, y: x @ y)
            torch.library.impl(library, name, "Meta")(lambda x, y: x @ y)
        mine = torch.ops.shardwise_decomposed

        @register_decomposition(mine.inner.default)
        def inner(x: Tensor, y: Tensor) -> Tensor:
            return x @ y

        @register_decomposition(mine.outer.default)
        def outer(x: Tensor, y: Tensor) -> Tensor:
            return mine.inner(x, y) * 1.0

        assert registered_decomposition(mine.outer.default) is outer
        assert served_by(mine.outer.default) == "decomposition"
        assert registered_decomposition(aten.addmm.default) is None
        with no_communication():
            found = mine.outer(on(mesh, a, Shard(0), Shard(1)), on(mesh, b, Replicate(), Shard(0)))
        assert found.placements == (Shard(0), Partial())
        torch.testing.assert_close(whole(found), a @ b)
        for op in (mine.inner.default, mine.outer.default):
            del decomposition_table[op]
