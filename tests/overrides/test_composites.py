"""PyTorch's functions that make plain tensors on their way: those are the same on all ranks, a user's own are not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise import Partial, Replicate, Shard, implicit_replication
from shardwise.errors import InputError, MixedTensorError
from shardwise.testing import assemble
from tests.ops.helpers import Case, check_case, on, r, ranks, table, whole

CASES: list[Case] = [
    ("combinations", torch.combinations, (r(5),)),
    ("quantile", lambda x: torch.quantile(x, 0.3, 1), (r(5, 4),)),
    ("nanquantile", lambda x: torch.nanquantile(x, 0.3), (r(5, 4),)),
    ("one_hot", lambda x: F.one_hot(x, 6), (torch.tensor([0, 5, 3, 3, 1]),)),
    ("one_hot of unknown size", F.one_hot, (torch.tensor([0, 5, 3, 3, 1]),)),
    ("stft", lambda x: torch.stft(x, 8, return_complex=True, window=x.new_ones(8)), (r(3, 20),)),
    ("matrix_rank", torch.linalg.matrix_rank, (r(2, 3, 3),)),
    ("matrix_power of nothing", lambda x: torch.linalg.matrix_power(x, -2), (r(0, 3, 3),)),
    (
        "causal attention",
        lambda q, k: F.scaled_dot_product_attention(q, k, k, is_causal=True),
        (r(2, 3, 4), r(2, 3, 4)),
    ),
    ("unravel_index", lambda x: torch.unravel_index(x, (7, 6)), (torch.tensor([3, 40, 11]),)),
    ("embedding_bag", lambda i, w: F.embedding_bag(i, w), (torch.tensor([[0, 5], [3, 3], [1, 2]]), r(6, 3))),
    ("tensor_split", torch.tensor_split, (r(5, 3), torch.tensor([1, 3]))),
    ("masked mean", lambda x: torch.masked.mean(x, 1), (r(5, 4),)),
    ("masked variance", lambda x: torch.masked.var(x, 1), (r(5, 4),)),
]


@table(CASES)
@pytest.mark.filterwarnings("ignore::shardwise.dispatch.fallback.GatherWarning")
def test_plain_tensors_made_inside_are_replicated(fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    check_case(fn, args, limit=3, meshes=((3,), (2, 2)))


@pytest.mark.parametrize(
    "call",
    [
        lambda x, plain: torch.quantile(x, plain),
        lambda x, plain: torch.masked.mean(x, 0, mask=plain > 0),
        lambda x, plain: F.embedding_bag(x.long(), plain[:, None], torch.tensor([0])),
    ],
    ids=["quantile", "masked mean", "embedding_bag"],
)
def test_plain_tensors_from_outside_are_refused(call: Callable[..., Any]) -> None:
    with ranks(2) as mesh, pytest.raises(MixedTensorError):
        call(on(mesh, torch.tensor([0.0, 1.0, 2.0]), Shard(0)), torch.tensor([0.25, 0.5, 0.75]))


def test_they_pass_in_inference_mode() -> None:
    with ranks(2) as mesh, torch.inference_mode():
        assert torch.combinations(on(mesh, r(4), Shard(0))).shape == (6, 2)


def test_other_tensors_are_left_alone() -> None:
    assert torch.equal(torch.combinations(torch.arange(3)), torch.tensor([[0, 1], [0, 2], [1, 2]]))
    with FakeTensorMode():
        assert F.one_hot(torch.zeros(3, dtype=torch.int64), 2).shape == (3, 2)


def test_gradients_that_are_zero_by_formula() -> None:
    """Sign is constant almost everywhere: PyTorch answers with plain zeros."""
    with ranks(3) as mesh:
        x = on(mesh, r(5, 2), Shard(0), grad=True)
        torch.sgn(x).sum().backward()
        assert x.grad is not None
        assert x.grad.placements == x.placements
        assert not x.grad.full_tensor().any()


def test_least_squares_agree_on_all_ranks() -> None:
    """On one device the last bits of the solution differ from call to call."""
    with ranks(4) as mesh:
        for seed in range(8):
            a, b = r(4, 3, seed=seed), r(4, 2, seed=seed + 1)
            found = torch.linalg.lstsq(on(mesh, a, Shard(1)), on(mesh, b))
            assert [tuple(part.shape) for part in found] == [tuple(part.shape) for part in torch.linalg.lstsq(a, b)]
            torch.testing.assert_close(assemble(found.solution), torch.linalg.lstsq(a, b).solution)


def test_sparse_tensors_are_refused() -> None:
    with ranks(2) as mesh, pytest.raises(InputError, match=r"full_tensor\(\)\.to_sparse"):
        on(mesh, r(4, 4), Shard(0)).to_sparse()


@pytest.mark.parametrize("fn", [torch.kron, torch.msort, F.logsigmoid], ids=["kron", "msort", "logsigmoid"])
def test_results_are_written_into_what_is_given(fn: Callable[..., Any]) -> None:
    given = (r(4, 3), r(2, 2)) if fn is torch.kron else (r(4, 3),)
    expected = fn(*given)
    with ranks(3) as mesh:
        out = on(mesh, torch.zeros_like(expected), Shard(0))
        write = torch.ops.aten.log_sigmoid.out if fn is F.logsigmoid else fn
        assert write(*(on(mesh, value, Shard(1)) for value in given), out=out) is out
        torch.testing.assert_close(whole(out), expected)


def test_batch_norm_with_results_given_updates_its_statistics() -> None:
    x, ones, zeros = r(5, 2), torch.ones(2), torch.zeros(2)
    mean, var = zeros.clone(), ones.clone()
    torch.native_batch_norm(x, ones, zeros, mean, var, True, 0.5, 1e-5)
    with ranks(2) as mesh:
        running = on(mesh, zeros), on(mesh, ones)
        outs = on(mesh, torch.zeros(5, 2), Shard(1)), on(mesh, zeros), on(mesh, zeros)
        given = on(mesh, x, Shard(0)), on(mesh, ones), on(mesh, zeros), *running
        torch.native_batch_norm(*given, True, 0.5, 1e-5, out=outs)
        torch.testing.assert_close(whole(running[0]), mean)
        torch.testing.assert_close(whole(running[1]), var)


def test_a_plain_operand_counts_as_replicated_where_the_user_says_so() -> None:
    x, w = r(6, 4), r(3, 4)
    target = torch.tensor([0, 2, 1, 1, 0, 2])
    with ranks(2) as mesh, implicit_replication():
        q = on(mesh, x, Shard(0))
        torch.testing.assert_close(
            whole(torch.quantile(q, torch.tensor([0.25, 0.5]))), torch.quantile(x, torch.tensor([0.25, 0.5]))
        )
        loss = F.cross_entropy(F.linear(q, w), target)
        torch.testing.assert_close(whole(loss), F.cross_entropy(F.linear(x, w), target))


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="not in this PyTorch")
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("plain_weight", [False, True])
def test_the_loss_of_a_linear_layer(reduction: str, plain_weight: bool) -> None:
    x, w, target = r(6, 4), r(3, 4), torch.tensor([0, 2, 1, 1, 0, 2])
    one = x.clone().requires_grad_()
    wanted = F.cross_entropy(F.linear(one, w), target, reduction=reduction)
    wanted.sum().backward()
    assert one.grad is not None
    with ranks(2) as mesh:
        q = on(mesh, x, Shard(0), grad=True)
        weight = w if plain_weight else on(mesh, w, Shard(0))
        with implicit_replication():
            found = F.linear_cross_entropy(q, weight, on(mesh, target, Shard(0)), reduction=reduction)
        found.sum().backward()
        torch.testing.assert_close(whole(found), wanted.detach())
        torch.testing.assert_close(whole(q.grad), one.grad)


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="not in this PyTorch")
def test_the_loss_of_a_linear_layer_in_chunks_has_no_gradient_for_class_weights() -> None:
    options = pytest.importorskip("torch.nn.modules.linear_cross_entropy_options").LinearCrossEntropyOptions(
        batch_chunk_size=2
    )
    x, w, c, target = r(6, 4), r(3, 4), r(3).abs(), torch.tensor([0, 2, 1, 1, 0, 2])
    one, one_c = x.clone().requires_grad_(), c.clone().requires_grad_()
    wanted = F.linear_cross_entropy(one, w, target, weight=one_c, options=options)
    wanted.backward()
    assert one_c.grad is None
    with ranks(2) as mesh:
        q, class_weight = on(mesh, x, Shard(0), grad=True), on(mesh, c, Partial("max"), grad=True)
        found = F.linear_cross_entropy(
            q, on(mesh, w, Replicate()), on(mesh, target, Shard(0)), weight=class_weight, options=options
        )
        found.backward()
        torch.testing.assert_close(whole(found), wanted.detach())
        torch.testing.assert_close(whole(q.grad), one.grad)
        assert class_weight.grad is None
