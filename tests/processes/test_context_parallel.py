"""Context parallel as PyTorch's programs use it: buffers are sharded in place and restored."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from shardwise.experimental._attention import context_parallel_unshard

from shardwise import Replicate, Shard, distribute_module, distribute_tensor
from shardwise.experimental import context_parallel
from shardwise.nn import attention_over_sequence, packed_attention, unzigzag, zigzag
from tests.nn.test_packed_attention import make_model, train
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


CASES = [
    ("ring", 21, {"is_causal": True, "enable_gqa": True}, 2),
    ("ring", 16, {"dropout_p": 0.3, "is_causal": True}, 4),
    ("heads", 19, {"is_causal": True}, 4),
    ("gather", 21, {}, 4),
]


@on_processes
def test_attention_over_a_sharded_sequence() -> None:
    mesh = mesh_of(4)
    for method, length, options, shared in CASES:
        generator = torch.Generator().manual_seed(length)
        tensors = [torch.randn(2, 4 if i == 0 else shared, length, 8, generator=generator) for i in range(3)]
        upstream = torch.randn(2, 4, length, 8, generator=generator)
        plain = [tensor.clone().requires_grad_() for tensor in tensors]
        torch.manual_seed(3)
        expected = F.scaled_dot_product_attention(*plain, **options)
        expected.backward(upstream)
        leaves = [distribute_tensor(tensor, mesh, [Shard(2)]).requires_grad_() for tensor in tensors]
        with attention_over_sequence(method):
            torch.manual_seed(3)
            found = F.scaled_dot_product_attention(*leaves, **options)
            found.backward(distribute_tensor(upstream, mesh, [Shard(2)]))
        torch.testing.assert_close(found.full_tensor(), expected)
        for leaf, reference in zip(leaves, plain, strict=True):
            torch.testing.assert_close(leaf.grad.full_tensor(), reference.grad)


@on_processes
def test_packed_documents_and_head_tail_order() -> None:
    mesh = mesh_of(4)
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, 4, 37, 8, generator=generator) for _ in range(3)]
    plain = [tensor.clone().requires_grad_() for tensor in tensors]
    edges = [0, 11, 12, 37]
    expected = packed_attention(*plain, edges)
    expected.sin().sum().backward()
    with attention_over_sequence("ring", zigzag=True):
        leaves = [distribute_tensor(tensor, mesh, [Replicate()]).requires_grad_() for tensor in tensors]
        found = packed_attention(*(zigzag(leaf, 2, 0) for leaf in leaves), edges)
        found.sin().sum().backward()
    torch.testing.assert_close(unzigzag(found.detach(), 2, 0).full_tensor(), expected.detach())
    for leaf, reference in zip(leaves, plain, strict=True):
        torch.testing.assert_close(leaf.grad.full_tensor(), reference.grad)


@on_processes
def test_training_on_packed_documents() -> None:
    mesh = mesh_of(4)
    reference, model = make_model(), make_model()
    expected = train(reference, lambda tensor: tensor)
    distribute_module(model, mesh)
    assert train(model, lambda tensor: distribute_tensor(tensor, mesh, [Shard(0)])) == pytest.approx(expected, abs=1e-4)
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one.full_tensor(), other, rtol=1e-4, atol=1e-4)
