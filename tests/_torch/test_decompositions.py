"""PyTorch's own decompositions of ops, as `_torch.decompositions` relies on them."""

from __future__ import annotations

import torch

from shardwise._torch.decompositions import is_composite, pytorch_decomposition

aten = torch.ops.aten


def test_the_table_of_decompositions_holds_the_ops_that_are_taken_from_it() -> None:
    x = torch.arange(24.0).view(1, 6, 2, 2)
    assert torch.equal(pytorch_decomposition(aten.channel_shuffle.default)(x, 2), aten.channel_shuffle.default(x, 2))
    a, b = torch.rand(3, 4), torch.rand(5, 4)
    torch.testing.assert_close(pytorch_decomposition(aten._euclidean_dist.default)(a, b), aten._euclidean_dist(a, b))
    from torch._decomp import decomposition_table

    assert aten._unsafe_masked_index.default in decomposition_table
    assert aten._unsafe_masked_index_put_accumulate.default in decomposition_table


def test_composite_ops_are_told_from_others() -> None:
    assert is_composite(aten.matmul.default)
    assert not is_composite(aten.mm.default)
