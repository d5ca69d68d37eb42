"""Context parallel with block masks by PyTorch's names: a rank's rows of the mask, its queries, and all keys."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from shardwise.experimental._attention import (
    _context_parallel_shard,
    _ContextParallel,
    _HeadTailLoadBalancer,
    _PerDocumentHeadTailLoadBalancer,
)
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from shardwise import Shard, distribute_tensor
from tests.processes.pool import on_processes
from tests.processes.reference import mesh_of
from tests.worlds import mesh_of as simulated

LENGTHS = [[16, 32, 16], [32, 16, 16]]


class Attend(nn.Module):
    def forward(self, query: Any, key: Any, value: Any, block_mask: Any = None) -> Any:
        return flex_attention(query, key, value, block_mask=block_mask, enable_gqa=True)


def attend_as_pytorch_does(mesh: Any, balancer: Any, batch: int = 2) -> None:
    """A program for PyTorch: buffers and mask are sharded, a module gathers its keys."""
    documents = torch.stack([torch.repeat_interleave(torch.arange(3), torch.tensor(own)) for own in LENGTHS[:batch]])
    mask_mod = lambda b, h, q, k: (documents[b, q] == documents[b, k]) & (q >= k)  # noqa: E731
    mask = create_block_mask(mask_mod, batch, None, 64, 64, device="cpu", BLOCK_SIZE=8)
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(batch, heads, 64, 8, generator=generator) for heads in (4, 2, 2)]
    upstream = torch.randn(batch, 4, 64, 8, generator=generator)
    order = torch.arange(64)[None] if balancer is None else balancer._generate_indices()
    index = order.expand(batch, 64)[:, None, :, None]

    def shard(tensor: torch.Tensor) -> torch.Tensor:
        arranged = tensor.gather(2, index.expand(tensor.shape))
        return distribute_tensor(arranged, mesh, [Shard(2)], src_data_rank=None).to_local()

    plain = [tensor.clone().requires_grad_() for tensor in tensors]
    allowed = (documents[:, :, None] == documents[:, None]) & torch.ones(64, 64).tril().bool()
    expected = F.scaled_dot_product_attention(*plain, attn_mask=allowed[:, None], enable_gqa=True)
    expected.backward(upstream)

    module = _ContextParallel(2, _ContextParallel.AttentionType.FLEX)._apply(Attend(), mesh)
    (local_mask,) = _context_parallel_shard(mesh, [mask], [2], balancer)
    assert local_mask.seq_lengths == (64 // mesh.size(), 64)
    leaves = [shard(tensor).requires_grad_() for tensor in tensors]
    output = module(leaves[0], leaves[1], value=leaves[2], block_mask=local_mask)
    output.backward(shard(upstream))
    torch.testing.assert_close(output.detach(), shard(expected.detach()))
    for leaf, one in zip(leaves, plain, strict=True):
        torch.testing.assert_close(leaf.grad, shard(one.grad), rtol=1e-4, atol=1e-5)


BALANCERS = [
    None,
    _HeadTailLoadBalancer(64, 4, "cpu"),
    _PerDocumentHeadTailLoadBalancer(LENGTHS, 4, "cpu"),
]


@pytest.mark.parametrize("balancer", BALANCERS)
def test_a_program_for_pytorch(balancer):
    with simulated(4) as mesh:
        attend_as_pytorch_does(mesh, balancer)


@on_processes
def test_on_processes() -> None:
    for balancer in BALANCERS:
        attend_as_pytorch_does(mesh_of(4), balancer)


def test_a_rank_lists_its_own_blocks_only():
    mask = create_block_mask(lambda b, h, q, k: q // 16 == k // 16, None, None, 64, 64, device="cpu", BLOCK_SIZE=8)
    with simulated(4) as mesh:
        (local,) = _context_parallel_shard(mesh, [mask], [2])
        counts = local.full_kv_num_blocks
        assert counts.shape == (1, 1, 2)
        assert counts.flatten().tolist() == [2, 2]
        assert [shard[0, 0, :, :2].tolist() for shard in local.full_kv_indices.shards] == [
            [[2 * rank, 2 * rank + 1]] * 2 for rank in range(4)
        ]
        assert local.kv_num_blocks.sum().tolist() == 0
