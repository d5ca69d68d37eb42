"""Rules of real ops against the op on global tensors: every factor, every pair, uneven and empty shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import randn

from shardwise.notation import bind, parse, pointwise, reduction, replicated_dims
from tests.notation.brute import check, check_shardings, shardable

aten = torch.ops.aten
norm = aten.native_layer_norm


torch.manual_seed(0)  # the tables below are filled at import: the same numbers in every run


def index(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape)


def layer_norm_backward() -> Any:
    x, w, b = randn(2, 4, 6), randn(6), randn(6)
    _, mean, rstd = norm(x, [6], w, b, 1e-5)
    return lambda g, x, m, r, w, b: aten.native_layer_norm_backward(g, x, [6], m, r, w, b, [True] * 3), (
        *(randn(2, 4, 6), x, mean, rstd, w, b),
    )


ADDMM = "m? n?, m k, k n -> m n ; linear 0+1 | 0+2"
LAYER_NORM = "b.. [n..], [n..], [n..] -> b.. [n..], b.. _.., b.. _.."
LAYER_NORM_BACKWARD = "b.. [n..], b.. [n..], b.. _.., b.. _.., [n..], [n..] -> b.. [n..], [n..], [n..] ; linear 0"
ATTENTION = "b h s [d], b h [t] [d], b h [t] [e] -> b h s [e], b h s ; reduce sum, none"
GROUPED = "b (g r) s [d], b g [t] [d], b g [t] [e] -> b (g r) s [e] ; linear 2"
NLL_NONE = "n [c], n, [c] -> n"
NLL = "n [c], n, [c] -> , ; reduce sum"
SOFTMAX = f"{replicated_dims('x', 3, 1)} -> {replicated_dims('x', 3, 1)}"
SCATTER = "x0 [x1], x0 [x1], x0 [x1] -> x0 [x1] ; ragged"
LINEAR_0 = "linear 0"

GATHER = "x0 [x1], x0 [x1] -> x0 [x1] ; ragged"

nll = aten.nll_loss_forward
flash = aten._scaled_dot_product_flash_attention_for_cpu
grouped = torch.nn.functional.scaled_dot_product_attention
log_probs = randn(8, 6).log_softmax(-1)
targets = torch.tensor([0, 1, 2, 3, -100, -100, -100, 5])

CASES = {
    "mm": ("m k, k n -> m n ; linear 0 | 1", aten.mm, randn(4, 6), randn(6, 5)),
    "bmm": ("b m k, b k n -> b m n ; linear 0 | 1", aten.bmm, randn(2, 4, 6), randn(2, 6, 5)),
    "mv": ("m k, k -> m ; linear 0 | 1", aten.mv, randn(4, 6), randn(6)),
    "dot": ("k, k -> ; linear 0 | 1", aten.dot, randn(7), randn(7)),
    "matmul": ("b?.. m k, b?.. k n -> b.. m n ; linear 0 | 1", torch.matmul, randn(3, 1, 4, 6), randn(2, 6, 5)),
    "addmm": (ADDMM, aten.addmm, randn(5), randn(4, 6), randn(6, 5)),
    "add": (pointwise(2, "linear 0+1", "monotone 0 | 1"), aten.add, randn(4, 6), randn(6)),
    "add ones": (pointwise(2, "linear 0+1"), aten.add, randn(4, 1, 6), randn(1, 1, 6)),
    "add two ranks": ("a? b?, a? b? -> a b ; linear 0+1", aten.add, randn(4, 6), randn(6)),
    "mul": (pointwise(2, "linear 0 | 1"), aten.mul, randn(4, 1, 5), randn(3, 1)),
    "maximum": (pointwise(2, "monotone 0 | 0+1", "reduce max"), aten.maximum, randn(4, 6), randn(6)),
    "neg": (pointwise(1, "linear 0", "antitone 0"), aten.neg, randn(3, 5)),
    "where": (pointwise(3, "linear 1+2"), aten.where, randn(4, 6) > 0, randn(6), randn(4, 1)),
    "sum": (reduction(3, [1]), lambda x: aten.sum(x, [1]), randn(4, 6, 2)),
    "sum keepdim": (reduction(3, [0, -1], True), lambda x: aten.sum(x, [0, 2], True), randn(4, 6, 2)),
    "sum all": (reduction(2, None), aten.sum, randn(4, 6)),
    "mean": (reduction(3, 1, reduce="avg"), lambda x: aten.mean(x, [1]), randn(4, 6, 2)),
    "amax": (reduction(3, 1, reduce="max"), lambda x: aten.amax(x, [1]), randn(4, 6, 2)),
    "amin": (reduction(3, 1, True, reduce="min"), lambda x: aten.amin(x, [1], True), randn(4, 6, 2)),
    "prod": (reduction(3, 1, reduce="product"), lambda x: aten.prod(x, 1), randn(4, 6, 2)),
    "argmax": (reduction(3, 1, reduce="none"), lambda x: aten.argmax(x, 1), randn(4, 6, 2)),
    "softmax": (SOFTMAX, lambda x: aten._softmax(x, 1, False), randn(4, 6, 5)),
    "layer_norm": (LAYER_NORM, lambda x, w, b: norm(x, [6], w, b, 1e-5), randn(2, 4, 6), randn(6), randn(6)),
    "layer_norm backward": (LAYER_NORM_BACKWARD, layer_norm_backward()[0], *layer_norm_backward()[1]),
    "embedding": ("[v] d, i.. -> i.. d ; linear 0", aten.embedding, randn(10, 4), index(10, 2, 6)),
    "embedding backward": (
        "i.. d, i.. -> [v] d ; linear 0",
        lambda g, i: aten.embedding_dense_backward(g, i, 10, -1, False),
        *(randn(2, 6, 4), index(10, 2, 6)),
    ),
    "attention": (ATTENTION, flash, randn(2, 4, 6, 8), randn(2, 4, 10, 8), randn(2, 4, 10, 8)),
    "grouped-query attention": (
        GROUPED,
        lambda q, k, v: grouped(q, k, v, enable_gqa=True),
        *(randn(2, 8, 6, 8), randn(2, 2, 10, 8), randn(2, 2, 10, 8)),
    ),
    "nll none": (NLL_NONE, lambda x, y, w: nll(x, y, w, 0, -100)[0], log_probs, targets, torch.rand(6)),
    "nll sum": (NLL, lambda x, y, w: nll(x, y, w, 2, -100), log_probs, targets, torch.rand(6)),
    "nll without weight": (NLL, lambda x, y, w: nll(x, y, w, 2, -100), log_probs, targets, None),
    "sort": ("x0 [x1] x2 -> x0 [x1] x2, x0 [x1] x2", lambda x: aten.sort(x, 1), randn(4, 6, 5)),
    "cumsum": ("x0 [x1] -> x0 [x1] ; linear 0", lambda x: aten.cumsum(x, 1), randn(4, 6)),
    "gather": (GATHER, lambda x, i: aten.gather(x, 1, i), randn(8, 5), index(5, 8, 3)),
    "gather ragged": (GATHER, lambda x, i: aten.gather(x, 1, i), randn(8, 5), index(5, 4, 3)),
    "scatter": (SCATTER, lambda x, i, s: aten.scatter(x, 1, i, s), randn(8, 5), index(1, 8, 1), randn(8, 3)),
    "scatter ragged": (SCATTER, lambda x, i, s: aten.scatter(x, 1, i, s), randn(8, 5), index(1, 8, 1), randn(9, 3)),
    "cat": ("{x0 _} -> x0 _ ; linear 0", lambda xs: aten.cat(xs, 1), [randn(4, 2), randn(4, 3)]),
    "stack": ("{x..} -> _ x.. ; linear all", lambda xs: aten.stack(xs, 0), [randn(4, 3), randn(4, 3)]),
    "split": ("x0 [x1] -> {x0 _} ; linear 0", lambda x: aten.split(x, 2, 1), randn(4, 5)),
    "unbind": ("[n] x.. -> {x..} ; linear 0", lambda x: aten.unbind(x), randn(3, 4, 5)),
    "transpose": ("a b c -> c b a ; linear 0", lambda x: aten.transpose(x, 0, 2), randn(3, 4, 5)),
    "diagonal": ("[a] [a] b -> b [a] ; linear 0", lambda x: aten.diagonal(x), randn(4, 4, 5)),
    "convolution": (
        "n c [h] [w], o c [i] [j], o -> n o [y] [x] ; linear 0+2 | 1+2",
        lambda x, w, b: torch.conv2d(x, w, b),
        *(randn(3, 2, 6, 6), randn(5, 2, 3, 3), randn(5)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_ops_on_shards_combine_to_the_op_on_global_tensors(name: str) -> None:
    check(*CASES[name])


SIZED: dict[str, tuple[Any, ...]] = {
    "view": ("(a b) c -> a (b c) ; linear 0 ; size=(a (b c))", aten.view, (24, 8), {"size": [4, 48]}),
    "view with -1": ("(a b) c -> a (b c) ; linear 0 ; size=(a (b c))", aten.view, (24, 8), {"size": [4, -1]}),
    "expand": ("a -> n a ; linear 0 ; size=(n a)", aten.expand, (5,), {"size": [4, -1]}),
    "expand a 1": ("a 1 -> a n ; linear 0 ; size=(a n)", aten.expand, (5, 1), {"size": [-1, 4]}),
    "zeros like": ("_.. -> a b ; size=(a b)", aten.new_zeros, (3,), {"size": [4, 5]}),
    "select backward": (
        "a c -> a [b] c ; linear 0 ; input_sizes=(a b c)",
        lambda g, input_sizes: aten.select_backward(g, input_sizes, 1, 0),
        *((4, 5), {"input_sizes": [4, 3, 5]}),
    ),
    "upsample": (
        "n c [h] [w] -> n c [y] [x] ; linear 0 ; input_size=(n c y x)",
        lambda g, input_size: aten.upsample_nearest2d_backward(g, [6, 6], input_size),
        *((4, 5, 6, 6), {"input_size": [4, 5, 3, 3]}),
    ),
    "repeat interleaved": (
        "a -> a n ; linear 0 ; times=(n)",
        lambda x, times: x[:, None].expand(-1, times),
        *((5,), {"times": 4}),
    ),
}


@pytest.mark.parametrize("name", SIZED)
def test_size_arguments_are_localised(name: str) -> None:
    text, fn, shape, arguments = SIZED[name]
    check(text, fn, randn(shape), **arguments)


def test_factories_are_cut_by_their_size_argument() -> None:
    bound = check("-> a b ; size=(a b)", lambda size: torch.ones(size), size=[4, 5])
    assert len(bound.factors) == 2
    assert not any(factor.must_replicate for factor in bound.factors)


def test_layer_norm_without_weights_learns_ranks_from_its_argument() -> None:
    text = f"{LAYER_NORM} ; normalized_shape=(n..)"
    fn = lambda x, w, b, normalized_shape: norm(x, normalized_shape, w, b, 1e-5)  # noqa: E731
    bound = check(text, fn, randn(2, 4, 6, 5), None, None, normalized_shape=[6, 5])
    assert [factor.name for factor in bound.factors if factor.must_replicate] == ["n0", "n1"]


@pytest.mark.parametrize(
    ("text", "fn", "tensors"),
    [
        ("n [c], n, [c] -> ", lambda x, y, w: nll(x, y, w, 1, -100)[0], (log_probs, targets, torch.rand(6))),
        ("m k -> m k ; linear 0", aten.exp, (randn(4, 6),)),
        ("m k -> m k", lambda x: aten._softmax(x, 1, False), (randn(4, 6),)),
        ("m k -> m", lambda x: aten.amax(x, [1]), (randn(4, 6),)),
        ("m k -> m k ; monotone 0", aten.neg, (randn(4, 6),)),
        (pointwise(2, "linear 0 | 1"), aten.add, (randn(4, 6), randn(6))),
        ("m? n?, m k, k n -> m n", aten.addmm, (randn(5), randn(4, 6), randn(6, 5))),
        (pointwise(2, "monotone 0+1"), aten.maximum, (randn(16, 16), randn(16))),
    ],
    ids=["mean of means", "exp", "softmax", "amax", "neg", "add", "bias added by every rank", "minimum of maxima"],
)  # fmt: skip
def test_a_wrong_rule_is_caught(text: str, fn: Any, tensors: Any) -> None:
    with pytest.raises(AssertionError):
        check(text, fn, *tensors)


def test_averages_are_cut_evenly_only() -> None:
    bound = bind(parse("a k -> a ; reduce avg"), [(4, 6)])
    assert [(factor.name, factor.even) for factor in bound.factors] == [("a", False), ("k", True)]
    mean = lambda x: x.mean(1)  # noqa: E731
    with pytest.raises(AssertionError):
        check_shardings(bound.rule, mean, [randn(4, 5)], {}, bind(bound.rule, [(4, 5)]), (2,), ((0, 1),))


def test_a_kernel_replaces_the_op_where_its_factor_is_cut() -> None:
    rule = parse("v d, i.. -> i.. d ; linear 0 ; kernel v")
    weight, rows = randn(7, 4), index(7, 2, 6)
    bound = bind(rule, [weight.shape, rows.shape])
    offsets = iter([0, 4])

    def embedding(w: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        if len(w) == 7:
            return aten.embedding(w, i)
        i = i - next(offsets)
        hit = (i >= 0) & (i < len(w))
        return aten.embedding(w, i.where(hit, 0)).where(hit[..., None], 0)

    assert bound.factor("v") not in shardable(bound, 2)
    check_shardings(rule, embedding, [weight, rows], {}, bound, (2,), ((0, bound.factor("v")),))
