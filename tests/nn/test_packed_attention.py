"""Packed documents: no token sees another document, whatever the sharding; a model trains as on one device."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise
from shardwise import DTensor, Replicate, Shard, distribute_tensor
from shardwise.errors import ShapeError
from shardwise.nn import attention_over_sequence, packed_attention, unzigzag, zigzag
from tests.ops.helpers import r, ranks, whole

LENGTHS = (137, 2041, 89)
TOKENS, VOCABULARY, HEADS, WIDTH = sum(LENGTHS), 32, 2, 8


def edges_of(lengths: Any) -> list[int]:
    return [0, *torch.tensor(lengths).cumsum(0).tolist()]


def one_device(tensors: list[Tensor], upstream: Tensor, **options: Any) -> list[Tensor]:
    """Document by document, with PyTorch alone."""
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    lengths = options.pop("lengths")
    parts = zip(*(leaf.split(lengths) for leaf in leaves), strict=True)
    outputs = [
        F.scaled_dot_product_attention(*(t.transpose(0, 1).unsqueeze(0) for t in part), enable_gqa=True, **options)
        for part in parts
    ]
    output = torch.cat([output.squeeze(0).transpose(0, 1) for output in outputs])
    output.backward(upstream)
    return [output.detach(), *(leaf.grad for leaf in leaves)]  # type: ignore[misc]


@pytest.mark.parametrize("method", ["ring", "heads", "gather"])
@pytest.mark.parametrize(("count", "causal", "shared"), [(4, True, 4), (8, False, 8), (2, True, 2)])
def test_each_document_is_by_itself(count: int, causal: bool, shared: int, method: Any) -> None:
    lengths = (5, 1, 23, 8)
    tensors = [r(37, 8 if i == 0 else shared, 4, seed=i) for i in range(3)]
    upstream = r(37, 8, 4, seed=5)
    expected = one_device(tensors, upstream, lengths=lengths, is_causal=causal, scale=0.4)
    options: Any = {"is_causal": causal, "scale": 0.4, "method": method}
    with ranks(count) as mesh:
        leaves = [distribute_tensor(tensor, mesh, [Shard(0)]).requires_grad_() for tensor in tensors]
        output = packed_attention(*leaves, edges_of(lengths), **options)
        assert isinstance(output, DTensor)
        assert output.placements == (Shard(0),)
        output.backward(distribute_tensor(upstream, mesh, [Shard(0)]))
        for found, wanted in zip([output, *(leaf.grad for leaf in leaves)], expected, strict=True):
            torch.testing.assert_close(whole(found), wanted)  # type: ignore[arg-type]


def test_plain_tensors_are_computed_by_document() -> None:
    tensors = [r(37, 4, 8, seed=i) for i in range(3)]
    expected = one_device(tensors, r(37, 4, 8), lengths=(5, 0, 32), is_causal=True)[0]
    torch.testing.assert_close(packed_attention(*tensors, torch.tensor([0, 5, 5, 37])), expected)


def test_head_tail_order_of_packed_documents() -> None:
    tensors = [r(1, 4, 37, 8, seed=i) for i in range(3)]
    expected = packed_attention(*tensors, [0, 11, 37])
    with ranks(4) as mesh, attention_over_sequence(zigzag=True):
        arranged = [zigzag(distribute_tensor(tensor, mesh, [Replicate()]), 2, "a") for tensor in tensors]
        for method in ("ring", "heads"):
            found: Any = packed_attention(*arranged, [0, 11, 37], method=method)  # type: ignore[arg-type]
            torch.testing.assert_close(whole(unzigzag(found, 2, "a")), expected)


def test_blocks_without_a_common_document_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwise.ops import ring_kernels

    calls: list[int] = []
    attend = ring_kernels.attend
    monkeypatch.setattr(ring_kernels, "attend", lambda q, *args: calls.append(q.shape[2]) or attend(q, *args))
    with ranks(4) as mesh:
        placed = [distribute_tensor(r(16, 4, 8), mesh, [Shard(0)]) for _ in range(3)]

        def blocks(edges: list[int]) -> list[int]:
            packed_attention(*placed, edges, method="ring")  # a new plan tries the op
            calls.clear()
            packed_attention(*placed, edges, method="ring")
            return calls

        assert blocks([0, 4, 8, 12, 16]) == [4, 4, 4, 4]  # each rank has one document, and looks at no other block
        assert len(blocks([0, 16])) == 1 + 2 + 3 + 4  # causal: later blocks are not looked at


def test_a_mask_of_documents_that_is_sharded_by_query() -> None:
    """The same with `F.scaled_dot_product_attention` and a bool mask."""
    tensors = [r(1, 4, 37, 8, seed=i) for i in range(3)]
    document = torch.bucketize(torch.arange(37), torch.tensor([11, 20, 37]), right=True)
    mask = (document[:, None] == document).tril()
    with ranks(4) as mesh, attention_over_sequence("ring"):
        placed = [distribute_tensor(tensor, mesh, [Shard(2)]) for tensor in tensors]
        found = F.scaled_dot_product_attention(*placed, attn_mask=distribute_tensor(mask, mesh, [Shard(0)]))
        torch.testing.assert_close(whole(found), packed_attention(*tensors, [0, 11, 20, 37]))


def test_wrong_lengths_are_refused() -> None:
    tensor = r(7, 2, 4)
    for edges in ([0, 3], [1, 7], [0, 5, 3, 7], []):
        with pytest.raises(ShapeError, match="cu_seqlens"):
            packed_attention(tensor, tensor, tensor, edges)
    with pytest.raises(ShapeError, match="equally many tokens"):
        packed_attention(tensor, tensor[:3], tensor[:3], [0, 7])


# ---- training -------------------------------------------------------------------------------------------------------


class Model(nn.Module):
    """One block over a sequence of packed documents, `[tokens]`."""

    def __init__(self) -> None:
        super().__init__()
        width = HEADS * WIDTH
        # Without a bias: the gradient of that of keys is 0 but for rounding, which AdamW would make large.
        self.tokens, self.norm = nn.Embedding(VOCABULARY, width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor, edges: list[int]) -> Tensor:
        x = self.tokens(tokens)
        q, k, v = (part.unflatten(-1, (HEADS, WIDTH)) for part in self.qkv(self.norm(x)).chunk(3, -1))
        result: Tensor = self.out(x + packed_attention(q, k, v, edges).flatten(1))
        return result


def train(model: Model, place: Any, steps: int = 8) -> list[float]:
    """Losses of steps of AdamW with clipping; each token predicts the next one."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        tokens = torch.randint(0, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(step))
        loss = F.cross_entropy(model(place(tokens), edges_of(LENGTHS)), place(tokens.roll(-1)))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append((loss.full_tensor() if isinstance(loss, DTensor) else loss).item())
    return losses


def make_model() -> Model:
    torch.manual_seed(0)
    return Model()


def test_training_over_eight_ranks_equals_one_device() -> None:
    """2267 tokens in documents of 137, 2041 and 89, over 8 ranks, of which the last has fewer."""
    reference, model = make_model(), make_model()
    expected = train(reference, lambda tensor: tensor)
    with ranks(8) as mesh:
        shardwise.distribute_module(model, mesh)
        found = train(model, lambda tensor: distribute_tensor(tensor, mesh, [Shard(0)]))
        parameters = [whole(parameter) for parameter in model.parameters()]  # type: ignore[arg-type]
    assert found == pytest.approx(expected, abs=1e-4)
    for one, other in zip(parameters, reference.parameters(), strict=True):
        torch.testing.assert_close(one, other.detach(), rtol=1e-4, atol=1e-4)


# ---- PyTorch's function ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_varlen_attn_of_pytorch(causal: bool) -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    tensors = [r(37, 4, 8, seed=i) for i in range(3)]
    upstream = r(37, 4, 8, seed=5)
    expected = one_device(tensors, upstream, lengths=(5, 32), is_causal=causal)
    edges = torch.tensor([0, 5, 37], dtype=torch.int32)
    options: Any = {"window_size": (-1, 0 if causal else -1)}
    if "window_size" not in inspect.signature(varlen.varlen_attn).parameters:
        options = {"is_causal": causal}
    with ranks(4) as mesh:
        leaves = [distribute_tensor(tensor, mesh, [Shard(0)]).requires_grad_() for tensor in tensors]
        output = varlen.varlen_attn(*leaves, edges, edges, 32, 32, **options)
        output.backward(distribute_tensor(upstream, mesh, [Shard(0)]))
        for found, wanted in zip([output, *(leaf.grad for leaf in leaves)], expected, strict=True):
            torch.testing.assert_close(whole(found), wanted)  # type: ignore[arg-type]
