"""Context parallel as PyTorch's programs use it: buffers are sharded in place and restored."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from shardwise.experimental._attention import context_parallel_unshard

from shardwise.experimental import context_parallel
from tests.processes.pool import on_processes
from tests.processes.reference import assert_same, mesh_of


@on_processes
def test_buffers_are_shards_inside_and_restored_after() -> None:
    mesh, rank = mesh_of(4), dist.get_rank()
    torch.manual_seed(0)
    query, key, value, table = (torch.randn(2, 3, 8, 4) for _ in range(4))
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    originals = [tensor.clone() for tensor in (query, key, value)]
    with context_parallel(
        mesh, buffers=[query, key, value, table], buffer_seq_dims=[2, 2, 2, 2], no_restore_buffers={table}
    ):
        for tensor, original in zip((query, key, value), originals, strict=True):
            assert_same(tensor, original[:, :, 2 * rank : 2 * rank + 2])
        (found,) = context_parallel_unshard(
            mesh, [F.scaled_dot_product_attention(query, key, value, is_causal=True)], [2]
        )
        torch.testing.assert_close(found, expected)
    for tensor, original in zip((query, key, value), originals, strict=True):
        assert_same(tensor, original)
    assert table.shape == (2, 3, 2, 4)
