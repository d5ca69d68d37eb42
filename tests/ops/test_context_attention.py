"""Attention over a sequence that is sharded by position equals one device: values, gradients, what is communicated."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import shardwise
from shardwise import DTensor, Replicate, Shard, distribute_tensor
from shardwise.debug import CommDebugMode
from shardwise.errors import InputError
from shardwise.nn import attention_over_sequence, unzigzag, zigzag
from shardwise.ops.attention_method import choose_method
from shardwise.ops.attention_segments import pairs_of, segments_of, zigzag_order, zigzag_runs
from shardwise.random import exact
from tests.ops.helpers import r, ranks, whole

attend = F.scaled_dot_product_attention


def inputs(length: int, heads: int = 4, shared: int | None = None, width: int = 8) -> list[Tensor]:
    return [r(2, heads if i == 0 else shared or heads, length, width, seed=i) for i in range(3)]


def on_one_device(tensors: list[Tensor], seed: int = 7, **options: Any) -> list[Tensor]:
    """The output, and the gradients of queries, keys and values."""
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    torch.manual_seed(seed)
    output = attend(*leaves, **options)
    output.backward(upstream(output))
    return [output.detach(), *(leaf.grad for leaf in leaves)]  # type: ignore[misc]


def upstream(output: Tensor) -> Tensor:
    return r(*output.shape, seed=9).to(output.dtype)


def sharded(mesh: Any, tensors: list[Tensor], seed: int = 7, placements: Any = None, **options: Any) -> list[Tensor]:
    placements = placements or [Shard(2)]
    leaves = [distribute_tensor(tensor, mesh, placements).requires_grad_() for tensor in tensors]
    torch.manual_seed(seed)
    output = attend(*leaves, **options)
    assert output.placements == tuple(placements)
    output.backward(distribute_tensor(upstream(output), mesh, placements))
    for leaf in leaves:
        assert leaf.grad.placements == tuple(placements)
    return [whole(output), *(whole(leaf.grad) for leaf in leaves)]


def assert_all_close(found: list[Tensor], expected: list[Tensor], **tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **tolerance)  # type: ignore[arg-type]


# ---- values and gradients -------------------------------------------------------------------------------------------

CASES = [
    # ranks, length, method, options, heads of keys
    (2, 16, "ring", {"is_causal": True}, 4),
    (4, 21, "ring", {"is_causal": True}, 2),
    (8, 5, "ring", {"is_causal": True}, 4),  # some ranks have no token
    (8, 37, "ring", {}, 1),
    (4, 16, "ring", {"dropout_p": 0.3, "is_causal": True}, 2),
    (2, 13, "ring", {"dropout_p": 0.3}, 4),
    (4, 18, "ring", {"attn_mask": "bool"}, 2),
    (2, 9, "ring", {"attn_mask": "float", "dropout_p": 0.2}, 4),
    (8, 20, "ring", {"attn_mask": "rows of a batch"}, 4),
    (4, 21, "ring", {"scale": 0.3}, 4),
    (2, 21, "heads", {"is_causal": True}, 2),
    (4, 19, "heads", {"dropout_p": 0.3}, 4),
    (4, 21, "gather", {"is_causal": True}, 2),
    (8, 16, "gather", {"dropout_p": 0.3, "is_causal": True}, 4),
    (4, 18, "gather", {"attn_mask": "bool"}, 4),
]


def make_mask(kind: str, length: int) -> Tensor:
    if kind == "float":
        return r(length, length, seed=5)
    shape = (2, 1, 1, length) if kind == "rows of a batch" else (length, length)
    mask = r(*shape, seed=5) > 0
    mask[..., 0] = True
    return mask


@pytest.mark.parametrize(("count", "length", "method", "options", "shared"), CASES)
def test_it_equals_one_device(count: int, length: int, method: Any, options: dict[str, Any], shared: int) -> None:
    tensors, options = inputs(length, shared=shared), {**options, "enable_gqa": shared != 4}
    mask = make_mask(options["attn_mask"], length) if "attn_mask" in options else None
    expected = on_one_device(tensors, **(options | ({} if mask is None else {"attn_mask": mask})))
    with ranks(count) as mesh, attention_over_sequence(method):
        if mask is not None:
            options["attn_mask"] = distribute_tensor(mask, mesh, [Shard(0) if mask.dim() == 2 else Replicate()])
        assert_all_close(sharded(mesh, tensors, **options), expected)


@pytest.mark.parametrize("p", [0.0, 0.25])
@pytest.mark.parametrize(("count", "length"), [(2, 16), (4, 21), (8, 40)])
@pytest.mark.parametrize("method", ["ring", "heads"])
def test_head_tail_order(count: int, length: int, p: float, method: Any) -> None:
    tensors = inputs(length, heads=8)
    expected = on_one_device(tensors, is_causal=True, dropout_p=p)
    with ranks(count) as mesh, attention_over_sequence(method, zigzag=True):
        arranged = [zigzag(on(mesh, tensor), 2, "a").detach().requires_grad_() for tensor in tensors]
        torch.manual_seed(7)
        output = attend(*arranged, is_causal=True, dropout_p=p)
        output.backward(zigzag(on(mesh, upstream(output)), 2, "a"))
        found = [output, *(leaf.grad for leaf in arranged)]
        assert_all_close([whole(unzigzag(tensor, 2, "a")) for tensor in found], expected)


def on(mesh: Any, tensor: Tensor) -> DTensor:
    return distribute_tensor(tensor, mesh, [Replicate()] * mesh.ndim)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    tensors = [tensor.to(dtype) for tensor in inputs(21)]
    expected = on_one_device(tensors, is_causal=True)
    tolerance = {"rtol": 3e-2, "atol": 3e-2} if dtype == torch.bfloat16 else {}
    with ranks(4) as mesh, attention_over_sequence("ring"):
        assert_all_close(sharded(mesh, tensors, is_causal=True), expected, **tolerance)


def test_many_weights_are_dropped_as_on_a_replicated_sequence() -> None:
    """So many that numbers are computed by index."""
    tensors = inputs(131)
    found = []
    with ranks(2, 2) as mesh, attention_over_sequence("ring"):
        for placements in (
            [Replicate(), Replicate()],
            [Shard(1), Shard(2)],
            [Shard(2), Shard(0)],
            [Shard(2), Shard(2)],
        ):
            found.append(sharded(mesh, tensors, placements=placements, dropout_p=0.4, is_causal=True))
    for other in found[1:]:
        assert_all_close(other, found[0])
    with ranks(4) as mesh, attention_over_sequence("ring"), exact():
        assert_all_close(sharded(mesh, tensors, dropout_p=0.4), on_one_device(tensors, dropout_p=0.4))


@pytest.mark.parametrize("method", ["ring", "heads", "gather"])
def test_heads_and_batch_on_other_axes(method: Any) -> None:
    tensors = inputs(11, heads=8, shared=4)
    options = {"is_causal": True, "enable_gqa": True}
    expected = on_one_device(tensors, **options)
    for placements in ([Shard(0), Shard(2), Shard(1)], [Shard(2), Shard(1), Shard(0)], [Shard(2), Shard(2), Shard(1)]):
        if method == "heads" and placements[1] == Shard(2) == placements[0]:
            continue  # 4 heads of keys over 8 ranks
        with ranks(2, 2, 2) as mesh, attention_over_sequence(method):
            assert_all_close(sharded(mesh, tensors, placements=placements, **options), expected)


def test_operands_that_are_sharded_differently_are_brought_together() -> None:
    tensors = inputs(11)
    with ranks(2, 2) as mesh, attention_over_sequence("ring"):
        expected = attend(*tensors, is_causal=True)
        placements = [Replicate(), Shard(0)], [Shard(2), Shard(0)], [Replicate(), Shard(2)]
        placed = [distribute_tensor(t, mesh, p) for t, p in zip(tensors, placements, strict=True)]
        torch.testing.assert_close(whole(attend(*placed, is_causal=True)), expected)


def test_a_mesh_of_some_ranks() -> None:
    tensors = inputs(9)
    expected = on_one_device(tensors, is_causal=True, dropout_p=0.3)
    with shardwise.simulate(4), attention_over_sequence("ring"):
        assert_all_close(sharded(DeviceMesh("cpu", [0, 2]), tensors, is_causal=True, dropout_p=0.3), expected)


def test_autocast_runs_in_its_dtype() -> None:
    with ranks(2) as mesh, attention_over_sequence("ring"), torch.autocast("cpu", torch.bfloat16):
        output = attend(*(distribute_tensor(tensor, mesh, [Shard(2)]) for tensor in inputs(8)))
        assert output.dtype == torch.bfloat16


def test_activations_may_be_recomputed() -> None:
    tensors = inputs(13)
    expected = on_one_device(tensors, is_causal=True, dropout_p=0.2)
    with ranks(4) as mesh, attention_over_sequence("ring"):
        leaves = [distribute_tensor(tensor, mesh, [Shard(2)]).requires_grad_() for tensor in tensors]
        torch.manual_seed(7)
        output = torch.utils.checkpoint.checkpoint(
            lambda *t: attend(*t, is_causal=True, dropout_p=0.2), *leaves, use_reentrant=False
        )
        output.backward(distribute_tensor(upstream(output), mesh, [Shard(2)]))
        assert_all_close([whole(output), *(whole(leaf.grad) for leaf in leaves)], expected)


def test_an_erased_step_draws_new_numbers() -> None:
    losses = []
    for erased in (False, True):
        with ranks(4) as mesh, attention_over_sequence("ring"):

            def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                return attend(q, k, v, is_causal=True, dropout_p=0.4).square().sum()

            run = shardwise.erase(step) if erased else step
            placed = [distribute_tensor(tensor, mesh, [Shard(2)]) for tensor in inputs(131)]
            torch.manual_seed(3)
            losses.append([whole(run(*placed)) for _ in range(3)])
    assert losses[0][0] != losses[0][1]
    assert_all_close(losses[1], losses[0])


# ---- what is communicated -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_a_ring_passes_blocks_on(causal: bool) -> None:
    with ranks(4) as mesh, attention_over_sequence("ring"):
        leaves = [distribute_tensor(tensor, mesh, [Shard(2)]).requires_grad_() for tensor in inputs(16, shared=4)]
        with CommDebugMode() as forward:
            output = attend(*leaves, is_causal=causal)
        with CommDebugMode() as backward:
            output.backward(output.detach())
    assert forward.get_total_counts() == 3  # each block goes to the three other ranks
    assert backward.get_total_counts() == 6  # and its gradients come back with it
    assert {str(name) for name in forward.get_comm_counts()} == {"c10d_functional.all_to_all_single"}


def test_key_heads_that_are_shared_travel_once() -> None:
    sizes = []
    for shared in (8, 2):
        with ranks(4) as mesh, attention_over_sequence("ring"):
            placed = [distribute_tensor(t, mesh, [Shard(2)]) for t in inputs(16, heads=8, shared=shared)]
            with CommDebugMode() as counted:
                attend(*placed, enable_gqa=True)
            sizes.append(counted.get_total_bytes())
    assert sizes[0] == 4 * sizes[1]


def test_the_cheaper_way_is_taken() -> None:
    with ranks(4) as mesh:

        def choice(heads: int, shared: int, length: int = 4096) -> str:
            specs = [
                shardwise.zeros(1, n, length, 64, device_mesh=mesh, placements=[Shard(2)]).spec
                for n in (heads, shared, shared)
            ]
            return choose_method(*specs).method

        assert choice(8, 8) == "heads"
        assert choice(8, 2) == "ring"  # four ranks do not divide two heads
        assert choice(256, 4) == "ring"  # keys and values are small beside queries
        placed = [distribute_tensor(tensor, mesh, [Shard(2)]) for tensor in inputs(1024, heads=8, width=64)]
        with CommDebugMode() as counted:
            attend(*placed)
        assert counted.get_total_counts() == 4  # queries, keys, values, output


def test_set_rotate_method_chooses_for_the_process() -> None:
    from shardwise.experimental import set_rotate_method
    from shardwise.ops.sequence_options import options

    tensors = inputs(16)
    try:
        for name, collectives in (("alltoall", 3), ("allgather", 2)):
            set_rotate_method(name)
            with ranks(4) as mesh:
                placed = [distribute_tensor(tensor, mesh, [Shard(2)]) for tensor in tensors]
                with CommDebugMode() as counted:
                    attend(*placed)
            assert counted.get_total_counts() == collectives
    finally:
        options.rotate_method = None


def test_what_is_impossible_says_so() -> None:
    with ranks(4) as mesh:
        placed = [distribute_tensor(tensor, mesh, [Shard(2)]) for tensor in inputs(16, heads=6)]
        with attention_over_sequence("heads"), pytest.raises(InputError, match="do not divide the heads"):
            attend(*placed)
        with pytest.raises(InputError, match="use one of 'ring', 'heads'"), attention_over_sequence("alltoall"):  # type: ignore[arg-type]
            pass
        shorter = distribute_tensor(r(2, 6, 8, 8), mesh, [Shard(2)])
        with attention_over_sequence(zigzag=True), pytest.raises(InputError, match="head-tail order"):
            attend(shorter, *placed[1:], is_causal=True)
        leaves = [tensor.detach().requires_grad_() for tensor in placed]
        with attention_over_sequence("ring"):
            output = attend(*leaves)
        first = torch.autograd.grad(output.sum(), leaves, retain_graph=True)
        again = torch.autograd.grad(output.sum(), leaves, create_graph=True)
        assert all(torch.equal(a.full_tensor(), b.full_tensor()) for a, b in zip(first, again, strict=True))
        with pytest.raises(NotImplementedError, match="second derivative"):
            again[0].square().sum().backward()


# ---- positions ------------------------------------------------------------------------------------------------------


def test_head_tail_order_shares_out_the_work() -> None:
    for length, count in ((64, 4), (61, 4), (5, 8), (2267, 8)):
        order = zigzag_order(length, count)
        assert sorted(order) == list(range(length))
        runs = zigzag_runs(length, count)
        work = [sum(sum(range(*run)) for run in runs[2 * rank : 2 * rank + 2]) for rank in range(count)]
        if length % (2 * count) == 0:
            assert len(set(work)) == 1


def test_segments_see_what_their_tokens_see() -> None:
    """Against a mask of all tokens."""
    documents = (0, 7, 8, 19)
    for zigzag_count in (0, 3):
        bounds = ((0, 7), (7, 14), (14, 19))
        pieces = segments_of(19, bounds, documents, zigzag_count)
        positions = zigzag_order(19, 3) if zigzag_count else list(range(19))
        seen = torch.zeros(19, 19, dtype=torch.int)
        for queries, (first, _) in zip(pieces, bounds, strict=True):
            for keys, (start, _) in zip(pieces, bounds, strict=True):
                for query, key, causal in pairs_of(queries, keys, True):
                    block = torch.ones(query.stop - query.start, key.stop - key.start, dtype=torch.int)
                    rows = slice(first + query.rows.start, first + query.rows.stop)
                    columns = slice(start + key.rows.start, start + key.rows.stop)
                    seen[rows, columns] += block.tril() if causal else block
        place = torch.tensor(positions)
        document = torch.bucketize(place, torch.tensor(documents[1:]), right=True)
        wanted = (place[:, None] >= place) & (document[:, None] == document)
        assert torch.equal(seen, wanted.int())


# ---- memory ---------------------------------------------------------------------------------------------------------


def _stored(order: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Random numbers of a shape, in a memory order: features last, heads inside positions, or features first."""
    batch, heads, length, width = shape
    return {
        "row-major": lambda: torch.randn(shape),
        "positions": lambda: torch.randn(batch, length, heads, width).transpose(1, 2),
        "features": lambda: torch.randn(batch, heads, width, length).mT,
    }[order]()


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"dropout_p": 0.3}])
def test_strides_are_those_of_one_device(options) -> None:
    orders = ("row-major", "positions", "features")
    with ranks(2) as mesh:
        for of_query, of_key, of_value in itertools.product(orders, repeat=3):
            plain = [_stored(order, (2, 4, 6, 8)).requires_grad_() for order in (of_query, of_key, of_value)]
            placed = [distribute_tensor(tensor.detach(), mesh, [Shard(2)]).requires_grad_() for tensor in plain]
            found = []
            for tensors in (plain, placed):
                output = F.scaled_dot_product_attention(*tensors, **options)
                gradients = torch.autograd.grad(output.sum(), tensors)
                found.append([tensor.stride() for tensor in (output, *gradients)])
            assert found[0] == found[1], (of_query, of_key, of_value)
