"""Attention over a sequence that is sharded by position, on a GPU that simulated ranks share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardwise
from shardwise import Shard, distribute_tensor, init_device_mesh
from shardwise.nn import attention_over_sequence, packed_attention

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    # PyTorch's backward thread says so if a product is the first thing that it does.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),
]


@pytest.mark.parametrize("method", ["ring", "heads", "gather"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"is_causal": True, "enable_gqa": True}])
def test_it_equals_one_device(method: Any, dtype: torch.dtype, options: dict[str, bool]) -> None:
    shared = 4 if options.get("enable_gqa") else 8
    torch.manual_seed(0)
    tensors = [torch.randn(2, 8 if i == 0 else shared, 203, 64, device="cuda", dtype=dtype) for i in range(3)]
    upstream = torch.randn_like(tensors[0])
    plain = [tensor.clone().requires_grad_() for tensor in tensors]
    expected = F.scaled_dot_product_attention(*plain, **options)
    expected.backward(upstream)
    tolerance = {"rtol": 3e-2, "atol": 3e-2} if dtype == torch.bfloat16 else {"rtol": 1e-3, "atol": 1e-4}
    with shardwise.simulate(4), attention_over_sequence(method):
        mesh = init_device_mesh("cuda", (4,))
        leaves = [distribute_tensor(tensor, mesh, [Shard(2)]).requires_grad_() for tensor in tensors]
        found = F.scaled_dot_product_attention(*leaves, **options)
        found.backward(distribute_tensor(upstream, mesh, [Shard(2)]))
        torch.testing.assert_close(found.full_tensor(), expected, **tolerance)
        for leaf, reference in zip(leaves, plain, strict=True):
            torch.testing.assert_close(leaf.grad.full_tensor(), reference.grad, **tolerance)


def test_dropout_does_not_depend_on_the_sharding() -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(2, 8, 203, 64, device="cuda") for _ in range(3)]
    found = []
    for placements in ([Shard(2), Shard(2)], [Shard(2), Shard(1)], [Shard(0), Shard(2)]):
        with shardwise.simulate(4), attention_over_sequence("ring"):
            mesh = init_device_mesh("cuda", (2, 2))
            torch.cuda.manual_seed(1)
            placed = [distribute_tensor(tensor, mesh, placements) for tensor in tensors]
            found.append(F.scaled_dot_product_attention(*placed, dropout_p=0.3, is_causal=True).full_tensor())
    for other in found[1:]:
        torch.testing.assert_close(shardwise.world.common(other), shardwise.world.common(found[0]))


def test_packed_documents() -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(2267, 8, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    edges = torch.tensor([0, 137, 2178, 2267], device="cuda")
    expected = packed_attention(*tensors, edges)
    with shardwise.simulate(8):
        mesh = init_device_mesh("cuda", (8,))
        found: Any = packed_attention(*(distribute_tensor(t, mesh, [Shard(0)]) for t in tensors), [0, 137, 2178, 2267])
        torch.testing.assert_close(found.full_tensor(), expected, rtol=3e-2, atol=3e-2)
