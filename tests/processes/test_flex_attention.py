"""flex_attention on processes, where gradients are PyTorch's own."""

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from shardwise import Replicate, Shard, distribute_tensor
from shardwise.nn import attention_over_sequence
from tests.processes.pool import on_processes
from tests.processes.reference import mesh_of

CASES = [
    ((4,), [Shard(2)], "gather"),
    ((4,), [Shard(2)], "heads"),
    ((2, 2), [Shard(1), Shard(2)], None),
    ((4,), [Shard(0)], None),  # a rank without a sequence
]


@on_processes
def test_packed_documents_and_a_learned_bias() -> None:
    lengths = [7, 61, 9]
    length = sum(lengths)
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(3, 4, length, 8, generator=generator) for _ in range(3)]
    table, upstream = torch.randn(4, generator=generator), torch.randn(3, 4, length, 8, generator=generator)
    *plain, learned = (tensor.clone().requires_grad_() for tensor in (*tensors, table))
    positions = torch.arange(length)
    allowed = (documents[:, None] == documents) & (positions[:, None] >= positions)
    bias = (positions % 5).float() * learned.view(4, 1, 1)
    mask = bias.masked_fill(~allowed, -torch.inf)
    expected = torch.nn.functional.scaled_dot_product_attention(*plain, attn_mask=mask)
    expected.backward(upstream)
    for sizes, placements, method in CASES:
        mesh = mesh_of(*sizes)
        leaves = [distribute_tensor(tensor, mesh, placements).requires_grad_() for tensor in tensors]
        held = distribute_tensor(table, mesh, [Replicate()] * len(sizes)).requires_grad_()
        where = distribute_tensor(documents, mesh, [Shard(0)] * len(sizes))
        counts = torch.full((1, 1, 5), 5, dtype=torch.int32)
        blocks = torch.arange(5, dtype=torch.int32).expand(1, 1, 5, 5).contiguous()
        mask_mod = lambda b, h, q, k, where=where: (where[q] == where[k]) & (q >= k)  # noqa: E731
        block_mask = BlockMask.from_kv_blocks(counts, blocks, BLOCK_SIZE=16, mask_mod=mask_mod, seq_lengths=(77, 77))
        with attention_over_sequence(method):
            found = flex_attention(*leaves, lambda score, b, h, q, k, held=held: score + (k % 5) * held[h], block_mask)
            found.backward(distribute_tensor(upstream, mesh, placements))
        assert found.placements == tuple(placements)
        torch.testing.assert_close(found.full_tensor().detach(), expected.detach(), rtol=1e-4, atol=1e-5)
        for leaf, one in zip((*leaves, held), (*plain, learned), strict=True):
            torch.testing.assert_close(leaf.grad.full_tensor(), one.grad, rtol=1e-4, atol=1e-5)
