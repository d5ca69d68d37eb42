"""flex_attention of distributed tensors equals one device: values, gradients, what is communicated."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import flex_attention as pytorch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention

from shardwise import DTensor, Partial, Replicate, Shard, distribute_tensor, explicit
from shardwise.debug import CommDebugMode
from shardwise.errors import CommunicationError, InputError, MixedTensorError, ShapeError
from shardwise.nn import attention_over_sequence, unzigzag, zigzag
from shardwise.ops.flex_layouts import choose_flex_method
from shardwise.overrides.install import install_overrides, uninstall_overrides
from shardwise.testing.values import make_dtensor
from tests.ops.helpers import r, ranks, whole

LENGTHS = [137, 2041, 89]


def inputs(length: int, heads: int = 4, shared: int | None = None, batch: int = 2, width: int = 8) -> list[Tensor]:
    return [r(batch, heads if i == 0 else shared or heads, length, width, seed=i) for i in range(3)]


def bias(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Differs for every index, so that a wrong one shows."""
    return score + 0.03 * (q - k) * (h + 1) + 0.1 * b * (k % 3)


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def uneven(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Depends on batch and head; some queries see nothing."""
    return (q - k >= b) & ((q + k + h) % 3 > 0)


def on_one_device(
    tensors: list[Tensor], score_mod: Any = None, mask_mod: Any = None, scale: float | None = None
) -> list[Tensor]:
    """The output, the logsumexp, and the gradients of queries, keys and values, by dense masks.

    Serves score_mods that add something.
    """
    query, key, value = leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    sizes = query.shape[0], query.shape[1], query.shape[2], key.shape[2]
    indices = torch.meshgrid(*map(torch.arange, sizes), indexing="ij")
    added = torch.zeros(sizes) if score_mod is None else score_mod(torch.zeros(sizes), *indices)
    if mask_mod is not None:
        added = added.masked_fill(~create_mask(mask_mod, *sizes, device="cpu"), -torch.inf)
    group = sizes[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale) + added
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    output = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0) @ value
    output.backward(r(*output.shape, seed=9))
    return [output.detach(), scores.detach().logsumexp(-1), *(leaf.grad for leaf in leaves)]  # type: ignore[misc]


def sharded(mesh: Any, tensors: list[Tensor], placements: Any, same: bool = True, **options: Any) -> list[Tensor]:
    """The same of distributed tensors. `placements` are those of all three, or a list for each."""
    each = placements if isinstance(placements[0], (list, tuple)) else [placements] * 3
    leaves = [make_dtensor(tensor, mesh, list(its), seed=0) for tensor, its in zip(tensors, each, strict=True)]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    output, logsumexp = flex_attention(*leaves, return_lse=True, enable_gqa=True, **options)
    assert isinstance(output, DTensor)
    if same:
        assert output.placements == logsumexp.placements == tuple(each[0])
    output.backward(distribute_tensor(r(*output.shape, seed=9), mesh, output.placements))
    return [whole(output), whole(logsumexp), *(whole(leaf.grad) for leaf in leaves)]


def assert_all_close(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.detach(), other.detach(), rtol=1e-4, atol=1e-5)


def mask_for(mask_mod: Any, tensors: list[Tensor], block: int = 16, by_head: bool = False) -> BlockMask:
    sizes = tensors[0].shape[:2] if by_head else (None, None)
    return create_block_mask(mask_mod, *sizes, tensors[0].shape[2], tensors[1].shape[2], device="cpu", BLOCK_SIZE=block)


S, R = Shard, Replicate

PLACEMENTS: list[tuple[tuple[int, ...], Any, dict[str, int]]] = [
    # mesh, placements, sizes
    ((4,), [S(2)], {"length": 64}),
    ((4,), [S(2)], {"length": 37, "shared": 2}),
    ((8,), [S(2)], {"length": 5, "heads": 3}),  # some ranks have no token
    ((4,), [S(1)], {"length": 20, "heads": 8, "shared": 4}),
    ((4,), [S(1)], {"length": 20, "heads": 8, "shared": 2}),  # ranks share a head of keys
    ((3,), [S(1)], {"length": 11, "heads": 5}),
    ((4,), [S(0)], {"length": 19, "batch": 3}),
    ((2,), [R()], {"length": 19}),
    ((2, 2), [S(0), S(2)], {"length": 33}),
    ((2, 2), [S(1), S(2)], {"length": 33, "shared": 2}),
    ((2, 2), [S(2), S(2)], {"length": 33, "shared": 1}),
    ((2, 2), [S(2), R()], {"length": 18}),
    ((2, 2, 2), [S(0), S(1), S(2)], {"length": 21, "shared": 2}),
]


@pytest.mark.parametrize(
    ("sizes", "placements", "shape", "method"),
    [(*case, "gather") for case in PLACEMENTS] + [(*case, "heads") for case in (PLACEMENTS[0], PLACEMENTS[8])],
)
def test_any_sharding_equals_one_device(sizes, placements, shape, method):
    tensors = inputs(**shape)
    with ranks(*sizes) as mesh, attention_over_sequence(method):
        mask = mask_for(uneven, tensors, by_head=True)
        found = sharded(mesh, tensors, placements, score_mod=bias, block_mask=mask)
    assert_all_close(found, on_one_device(tensors, bias, uneven))


MIXED = [
    ([[R()], [S(2)], [S(2)]], [S(2)]),
    ([[S(2)], [R()], [R()]], [S(2)]),
    ([[S(2)], [S(1)], [S(0)]], [S(2)]),
    ([[S(3)], [S(3)], [S(3)]], [R()]),
    ([[Partial()], [Partial()], [S(2)]], [S(2)]),
    ([[S(1)], [S(2)], [R()]], [S(1)]),
]


@pytest.mark.parametrize(("placements", "result"), MIXED)
def test_operands_that_are_sharded_differently(placements, result):
    tensors = inputs(22)
    with ranks(4) as mesh:
        mask = mask_for(causal, tensors)
        found = sharded(mesh, tensors, placements, same=False, score_mod=bias, block_mask=mask)
        leaves = [make_dtensor(t, mesh, list(p), seed=0) for t, p in zip(tensors, placements, strict=True)]
        assert flex_attention(*leaves, score_mod=bias, block_mask=mask).placements == tuple(result)
    assert_all_close(found, on_one_device(tensors, bias, causal))


def test_packed_documents_of_different_lengths():
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(LENGTHS))

    def in_document(b, h, q, k):
        return (documents[q] == documents[k]) & (q >= k)

    tensors = inputs(sum(LENGTHS), heads=2, batch=1)
    mask = mask_for(in_document, tensors, block=128)
    with ranks(8) as mesh:
        found = sharded(mesh, tensors, [S(2)], block_mask=mask)
    assert_all_close(found, on_one_device(tensors, None, in_document))


def test_a_token_sees_its_own_document_only():
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(LENGTHS))
    tensors = inputs(sum(LENGTHS), heads=1, batch=1)
    mask = mask_for(lambda b, h, q, k: documents[q] == documents[k], tensors, block=128)
    with ranks(8) as mesh:
        before = whole(flex_attention(*(distribute_tensor(t, mesh, [S(2)]) for t in tensors), block_mask=mask))
        for tensor in tensors[1:]:
            tensor[:, :, 137:2178] += 3.0  # the second document
        after = whole(flex_attention(*(distribute_tensor(t, mesh, [S(2)]) for t in tensors), block_mask=mask))
    torch.testing.assert_close(before[:, :, :137], after[:, :, :137])
    torch.testing.assert_close(before[:, :, 2178:], after[:, :, 2178:])
    assert (before[:, :, 137:2178] != after[:, :, 137:2178]).any(-1).all()


# ---- what functions hold --------------------------------------------------------------------------------------------


class Held(nn.Module):
    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table)

    def forward(self, score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + self.table[h]

    def method(self, score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + self.table[h, (q + k) % 3]


def by_closure(table: Tensor) -> Callable[..., Tensor]:
    return lambda score, b, h, q, k: score + table[h][(q + k) % 3]


def by_default(table: Tensor) -> Callable[..., Tensor]:
    def score_mod(score, b, h, q, k, *, table=table):
        return score + table[h, 1]

    return score_mod


def by_partial(table: Tensor) -> Callable[..., Tensor]:
    def score_mod(tables, score, b, h, q, k):
        return score + tables["one"][0][h, k % 3]

    return functools.partial(score_mod, {"one": [table]})


def by_inner_function(table: Tensor) -> Callable[..., Tensor]:
    inner = by_closure(table)
    return lambda score, *indices: inner(score, *indices) * 1.0


HOLDERS = [by_closure, by_default, by_partial, by_inner_function, lambda t: Held(t).method]


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("placements", [[S(0), R()], [R(), S(1)], [R(), R()]])
def test_functions_may_hold_distributed_tensors_that_learn(holder, placements):
    tensors, table = inputs(21), r(4, 3, seed=5)
    plain = table.clone().requires_grad_()
    output = on_one_device_with(tensors, holder(plain))
    output.backward(r(*output.shape, seed=9))
    with ranks(2, 2) as mesh:
        learned = distribute_tensor(table, mesh, placements).requires_grad_()
        leaves = [distribute_tensor(tensor, mesh, [S(0), S(2)]).requires_grad_() for tensor in tensors]
        found = flex_attention(*leaves, score_mod=holder(learned), block_mask=mask_for(causal, tensors))
        found.backward(distribute_tensor(r(*output.shape, seed=9), mesh, [S(0), S(2)]))
        assert learned.grad.placements == tuple(placements)
        assert_all_close([whole(found), whole(learned.grad)], [output, plain.grad])


def on_one_device_with(tensors: list[Tensor], score_mod: Callable[..., Tensor]) -> Tensor:
    """Causal attention of plain tensors, differentiable in what the function holds."""
    sizes = [range(size) for size in (*tensors[0].shape[:3], tensors[0].shape[2])]
    indices = torch.meshgrid(*(torch.tensor(list(size)) for size in sizes), indexing="ij")
    zero = torch.zeros(())
    flat = zip(*(index.flatten() for index in indices), strict=True)
    added = torch.stack([score_mod(zero, *(int(i) for i in at)) for at in flat]).view(indices[0].shape)
    mask = torch.full(added.shape[-2:], -torch.inf).triu(1)
    return F.scaled_dot_product_attention(*tensors, attn_mask=added + mask)


def test_a_mask_may_be_created_from_distributed_documents():
    documents = torch.tensor([0] * 9 + [1] * 20 + [2] * 4)
    tensors = inputs(33)
    with ranks(4) as mesh:
        held = distribute_tensor(documents, mesh, [S(0)])
        mask = mask_for(lambda b, h, q, k: held[q] == held[k], tensors)
        found = sharded(mesh, tensors, [S(2)], block_mask=mask)
        again = whole(flex_attention(*(distribute_tensor(t, mesh, [S(1)]) for t in tensors), block_mask=mask))
    expected = on_one_device(tensors, None, lambda b, h, q, k: documents[q] == documents[k])
    assert_all_close([*found, again], [*expected, expected[0]])


# ---- options --------------------------------------------------------------------------------------------------------


def test_scale_and_scores_that_are_not_added():
    tensors = inputs(30)

    def capped(score, b, h, q, k):
        return 2.0 * torch.tanh(score / 2.0)

    scores = (tensors[0] @ tensors[1].transpose(-1, -2) * 0.7 / 2).tanh() * 2
    with ranks(4) as mesh:
        leaves = [distribute_tensor(tensor, mesh, [S(2)]) for tensor in tensors]
        found = whole(flex_attention(*leaves, score_mod=capped, scale=0.7))
    torch.testing.assert_close(found, scores.softmax(-1) @ tensors[2])


def test_equals_pytorch_and_plain_tensors_pass():
    tensors = inputs(40, heads=4, shared=2)
    mask = mask_for(uneven, tensors, by_head=True)
    aux = pytorch.AuxRequest(lse=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*without torch.compile")
        output, expected = flex_attention(*tensors, score_mod=bias, block_mask=mask, enable_gqa=True, return_aux=aux)
    with ranks(4) as mesh:
        leaves = [distribute_tensor(tensor, mesh, [S(2)]) for tensor in tensors]
        found, its = flex_attention(*leaves, score_mod=bias, block_mask=mask, enable_gqa=True, return_aux=aux)
        assert isinstance(its, pytorch.AuxOutput)
        assert its.max_scores is None
        assert_all_close([whole(found), whole(its.lse)], [output, expected.lse])
        both = pytorch.AuxRequest(lse=True, max_scores=True)
        largest = flex_attention(*leaves, enable_gqa=True, return_aux=both)[1].max_scores
        scores = tensors[0] @ tensors[1].repeat_interleave(2, 1).transpose(-1, -2) * 8**-0.5
        assert_all_close([whole(largest)], [scores.amax(-1)])


def test_the_gradient_of_the_logsumexp():
    tensors = inputs(18)
    leaves = [tensor.clone().requires_grad_() for tensor in tensors[:2]]
    (leaves[0] @ leaves[1].transpose(-1, -2) * 8**-0.5).logsumexp(-1).square().sum().backward()
    with ranks(4) as mesh:
        placed = [distribute_tensor(tensor, mesh, [S(2)]).requires_grad_() for tensor in tensors]
        flex_attention(*placed, return_lse=True)[1].square().sum().backward()
        assert_all_close([whole(leaf.grad) for leaf in placed[:2]], [leaf.grad for leaf in leaves])
        assert not whole(placed[2].grad).any()


def test_blocks_that_a_mask_does_not_list_are_not_computed():
    tensors = inputs(32, batch=1, heads=1)
    counts, indices = torch.ones(1, 1, 4, dtype=torch.int32), torch.tensor([0, 1, 0, 3], dtype=torch.int32)
    columns = indices.view(1, 1, 4, 1).expand(1, 1, 4, 4).contiguous()
    mask = BlockMask.from_kv_blocks(counts, columns, BLOCK_SIZE=8, seq_lengths=(32, 32))
    with ranks(3) as mesh:
        found = sharded(mesh, tensors, [S(2)], block_mask=mask)
    assert_all_close(found, on_one_device(tensors, None, lambda b, h, q, k: indices[q // 8] == k // 8))


def test_the_lists_of_a_mask_may_be_written_between_calls():
    tensors = inputs(32, batch=1, heads=1)
    with ranks(2) as mesh:
        for inference in (False, True):
            with torch.inference_mode(inference):
                counts, columns = torch.ones(1, 1, 4, dtype=torch.int32), torch.zeros(1, 1, 4, 4, dtype=torch.int32)
                mask = BlockMask.from_kv_blocks(counts, columns, BLOCK_SIZE=8, seq_lengths=(32, 32))
                if inference:
                    assert mask.kv_indices.is_inference()
                for block in (0, 3, 1):
                    if block == 1:
                        mask.kv_indices = torch.ones_like(columns)
                    else:
                        mask.kv_indices.fill_(block)
                    placed = [distribute_tensor(tensor, mesh, [S(2)]) for tensor in tensors]
                    found = whole(flex_attention(*placed, block_mask=mask))
                    seen = [tensor[:, :, 8 * block : 8 * block + 8] for tensor in tensors[1:]]
                    torch.testing.assert_close(found, F.scaled_dot_product_attention(tensors[0], *seen))


def test_half_precision():
    tensors = [tensor.bfloat16() for tensor in inputs(33)]
    expected = F.scaled_dot_product_attention(*tensors, is_causal=True)
    with ranks(4) as mesh:
        leaves = [distribute_tensor(tensor, mesh, [S(2)]) for tensor in tensors]
        output, logsumexp = flex_attention(*leaves, block_mask=mask_for(causal, tensors), return_lse=True)
        assert (output.dtype, logsumexp.dtype) == (torch.bfloat16, torch.float32)
        torch.testing.assert_close(whole(output), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("method", ["gather", "heads"])
def test_head_tail_order(method):
    tensors = inputs(33)
    with ranks(4) as mesh, attention_over_sequence(method, zigzag=True):
        leaves = [distribute_tensor(tensor, mesh, [R()]).requires_grad_() for tensor in tensors]
        arranged = [zigzag(leaf, 2, "a") for leaf in leaves]
        output = flex_attention(*arranged, score_mod=bias, block_mask=mask_for(uneven, tensors, by_head=True))
        assert output.placements == (S(2),)
        back = unzigzag(output, 2, "a")
        back.backward(distribute_tensor(r(*output.shape, seed=9), mesh, [R()]))
        found = [whole(back), *(whole(leaf.grad) for leaf in leaves)]
    expected = on_one_device(tensors, bias, uneven)
    assert_all_close(found, [expected[0], *expected[2:]])


# ---- what is communicated -------------------------------------------------------------------------------------------


def counted(mesh: Any, tensors: list[Tensor], method: Any, placements: Any) -> tuple[dict[str, int], dict[str, int]]:
    leaves = [distribute_tensor(tensor, mesh, placements).requires_grad_() for tensor in tensors]
    mask, upstream = mask_for(causal, tensors), distribute_tensor(r(*tensors[0].shape, seed=9), mesh, placements)
    found = []
    with attention_over_sequence(method):
        with CommDebugMode() as forward:
            output = flex_attention(*leaves, score_mod=bias, block_mask=mask)
        found.append(forward)
        with CommDebugMode() as backward:
            output.backward(upstream)
        found.append(backward)
    return tuple({str(op).split(".")[-1]: n for op, n in mode.get_comm_counts().items()} for mode in found)  # type: ignore[return-value]


def test_keys_and_values_are_gathered_and_their_gradients_scattered():
    with ranks(4) as mesh:
        forward, backward = counted(mesh, inputs(32), "gather", [S(2)])
    assert forward == {"all_gather_into_tensor": 2}
    assert backward == {"reduce_scatter_tensor": 2}


def test_by_heads_everything_is_exchanged():
    with ranks(4) as mesh:
        forward, backward = counted(mesh, inputs(32), "heads", [S(2)])
    assert forward == {"all_to_all_single": 4}  # queries, keys, values and the output
    assert backward == {"all_to_all_single": 4}


@pytest.mark.parametrize("placements", [[S(0)], [S(1)], [R()]])
def test_batch_and_heads_need_no_communication(placements):
    with ranks(2) as mesh, explicit():
        assert counted(mesh, inputs(32), None, placements) == ({}, {})


def test_the_cost_model_chooses():
    with ranks(4) as mesh:

        def choice(heads: int, shared: int) -> str:
            sizes = [(1, heads, 4096, 64), (1, shared, 4096, 64), (1, shared, 4096, 64)]
            q, k, v = (DTensor.from_local(torch.empty(s, device="meta"), mesh, [R()]) for s in sizes)
            return choose_flex_method(*(x._spec.with_placements([S(2)]) for x in (q, k, v))).method

        assert choice(8, 8) == "heads"
        assert choice(8, 2) == "gather"  # the ranks do not divide the heads of keys


# ---- errors ---------------------------------------------------------------------------------------------------------


def test_errors_say_what_to_write():
    tensors = inputs(16)
    with ranks(4) as mesh:
        leaves = [distribute_tensor(tensor, mesh, [S(2)]) for tensor in tensors]
        with (
            pytest.raises(CommunicationError, match=r"key = key.redistribute"),
            explicit(),
            attention_over_sequence("gather"),
        ):
            flex_attention(*leaves)
        with pytest.raises(MixedTensorError, match="plain tensors as value"):
            flex_attention(leaves[0], leaves[1], tensors[2])
        with pytest.raises(ShapeError, match="global lengths"):
            flex_attention(*leaves, block_mask=mask_for(causal, inputs(4)))
        with pytest.raises(ShapeError, match="enable_gqa"):
            flex_attention(leaves[0], leaves[1][:, :2], leaves[2][:, :2])
        learned = torch.ones(4, requires_grad=True)
        with pytest.raises(InputError, match="distribute it"):
            flex_attention(*leaves, score_mod=lambda score, b, h, q, k: score + learned[h])
        with pytest.raises(InputError, match="do not divide the heads"), attention_over_sequence("heads"):
            flex_attention(leaves[0], leaves[1][:, :2], leaves[2][:, :2], enable_gqa=True)


def test_the_functions_are_put_back():
    ours = pytorch.flex_attention
    uninstall_overrides()
    try:
        assert pytorch.flex_attention is not ours
        assert pytorch.flex_attention is ours.__wrapped__  # type: ignore[attr-defined]
    finally:
        install_overrides()
    assert hasattr(pytorch.flex_attention, "__wrapped__")


def test_inference_first_and_training_after():
    tensors = inputs(24, shared=2)
    with ranks(4) as mesh:
        mask = mask_for(causal, tensors)
        with torch.inference_mode():
            flex_attention(*(distribute_tensor(t, mesh, [S(2)]) for t in tensors), block_mask=mask, enable_gqa=True)
        found = sharded(mesh, tensors, [S(2)], block_mask=mask)
    assert_all_close(found, on_one_device(tensors, None, causal))


def test_compiled():
    tensors = inputs(32, batch=1, heads=2)
    mask, expected = mask_for(causal, tensors), F.scaled_dot_product_attention(*tensors, is_causal=True)
    one_graph = torch.compile(flex_attention, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(one_graph(*tensors, block_mask=mask), expected)
    with ranks(2) as mesh:
        placed = [distribute_tensor(tensor, mesh, [S(2)]) for tensor in tensors]
        found = torch.compile(flex_attention, backend="aot_eager")(*placed, block_mask=mask)
        torch.testing.assert_close(whole(found), expected)
