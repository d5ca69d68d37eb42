"""Sample calls that PyTorch's operator database lacks, a function for each entry."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

Row = tuple[Callable[..., object], tuple[object, ...], dict[str, object]]
"""One call: a function, its arguments, and its keyword arguments."""

aten = torch.ops.aten


def random_values(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return normally distributed numbers with few digits, so that sums of some of them are exact."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return ((values * 1024).round() / 1024).to(dtype)


def integers(high: int, *shape: int, seed: int = 0) -> Tensor:
    """Return random integers from 0 up to, but not including, `high`."""
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def _lists(count: int, positive: bool = False) -> tuple[list[Tensor], ...]:
    """Return `count` lists of three tensors, with the same shapes in each list."""
    found = []
    for i in range(count):
        tensors = [random_values(*shape, seed=10 * i + j) for j, shape in enumerate([(5, 3), (4,), (2, 6)])]
        found.append([t.abs() + 0.5 for t in tensors] if positive and i else tensors)
    return tuple(found)


def _foreach() -> list[Row]:
    rows: list[Row] = []
    for name in ("abs", "exp", "neg", "sign", "sigmoid", "trunc"):
        rows.append((getattr(aten, f"_foreach_{name}"), (_lists(1)[0],), {}))
    for name in ("add", "sub", "mul", "div", "maximum", "minimum", "clamp_min", "clamp_max"):
        rows.append((getattr(aten, f"_foreach_{name}"), _lists(2, positive=True), {}))
        rows.append((getattr(aten, f"_foreach_{name}"), (_lists(1)[0], 0.75), {}))
    for name in ("addcmul", "addcdiv"):
        rows.append((getattr(aten, f"_foreach_{name}"), _lists(3, positive=True), {"value": 0.5}))
    rows.append((aten._foreach_lerp, (*_lists(2), 0.25), {}))
    rows.append((aten._foreach_lerp, _lists(3), {}))
    rows += [(aten._foreach_norm, (_lists(1)[0], order), {}) for order in (1, 2, float("inf"))]
    rows.append((aten._foreach_max, (_lists(1)[0],), {}))
    rows.append((aten._foreach_mul, (_lists(1)[0], torch.tensor(1.5, dtype=torch.float64)), {}))
    return rows


def _foreach_in_place() -> list[Row]:
    def in_place(op: Callable[..., object]) -> Callable[..., object]:
        def call(lists: list[Tensor], *args: object, **kwargs: object) -> list[Tensor]:
            lists = [tensor.clone() for tensor in lists]
            op(lists, *args, **kwargs)
            return lists

        call.__name__ = op.__name__
        return call

    rows: list[Row] = [(in_place(aten._foreach_add_), _lists(2), {"alpha": 2.0})]
    rows.append((in_place(aten._foreach_mul_), (_lists(1)[0], 0.5), {}))
    rows.append((in_place(aten._foreach_addcdiv_), _lists(3, positive=True), {"value": -0.1}))
    rows.append((in_place(aten._foreach_lerp_), (*_lists(2), 0.1), {}))
    rows.append((in_place(aten._foreach_zero_), (_lists(1)[0],), {}))
    return rows


def _fused() -> list[Row]:
    options = {"lr": 0.1, "weight_decay": 0.01, "maximize": False, "grad_scale": None, "found_inf": None}
    adam = {**options, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "amsgrad": False}
    sgd = {**options, "momentum": 0.9, "dampening": 0.0, "nesterov": False, "is_first_step": False}

    def step(op: Callable[..., object], lists: int, **settings: object) -> Callable[..., object]:
        def call(*given: list[Tensor]) -> object:
            state = [[tensor.clone() for tensor in tensors] for tensors in given]
            extra = [] if lists == 3 else [[], [torch.tensor(3.0) for _ in given[0]]]
            op(*state, *extra, **settings)
            return state

        call.__name__ = op.__name__
        return call

    def of(op: Callable[..., object], lists: int, settings: Mapping[str, object]) -> Row:
        given = _lists(lists)
        if lists == 4:
            given = (*given[:3], [tensor.abs() for tensor in given[3]])
        return step(op, lists, **settings), tuple([t.float() for t in tensors] for tensors in given), {}

    return [of(aten._fused_adam_, 4, adam), of(aten._fused_adamw_, 4, adam), of(aten._fused_sgd_, 3, sgd)]


def _attention() -> list[Row]:
    query, key, value = random_values(2, 4, 5, 8), random_values(2, 4, 6, 8, seed=1), random_values(2, 4, 6, 8, seed=2)
    mask = integers(2, 5, 6).bool() | (torch.arange(6) == 0)
    rows: list[Row] = [
        (F.scaled_dot_product_attention, (query, key, value), {}),
        (F.scaled_dot_product_attention, (query, query * 2, value[:, :, :5]), {"is_causal": True}),
        (F.scaled_dot_product_attention, (query, key, value), {"attn_mask": mask}),
        (F.scaled_dot_product_attention, (query, key, value), {"attn_mask": mask.double(), "scale": 0.5}),
        (F.scaled_dot_product_attention, (query, key[:, :2], value[:, :2]), {"enable_gqa": True}),
    ]
    return rows


def _ring_attention() -> list[Row]:
    query, key, value = (random_values(2, heads, 7, 8, seed=heads) for heads in (4, 2, 2))
    mask = integers(2, 7, 7).bool() | (torch.arange(7) == 0)
    gradient, output = random_values(2, 4, 7, 8, seed=5), random_values(2, 4, 7, 8, seed=6)
    logsumexp = random_values(2, 4, 7, seed=7).abs() + 1
    rows: list[Row] = []
    for masked, documents, zigzag, rotate in (
        (False, [], 0, "ring"),
        (True, [], 0, "ring"),
        (False, [0, 2, 7], 2, "gather"),
    ):
        options = (mask if masked else None, None, 0.0, not masked, 0.3, documents, zigzag, rotate)
        saved = (gradient, query, key, value, output, logsumexp)
        rows.append((torch.ops.shardwise.ring_attention.default, (query, key, value, *options), {}))
        rows.append((torch.ops.shardwise.ring_attention_backward.default, (*saved, *options), {}))
    return rows


def _embedding() -> list[Row]:
    table, rows = random_values(7, 4), integers(7, 3, 5)
    return [
        (F.embedding, (rows, table), {}),
        (F.embedding, (rows, table), {"padding_idx": 2}),
        (F.embedding, (rows, table), {"scale_grad_by_freq": True}),
        (aten.embedding_dense_backward, (random_values(3, 5, 4), rows, 7, -1, False), {}),
        (aten.embedding_dense_backward, (random_values(3, 5, 4), rows, 7, 3, True), {}),
    ]


def _losses() -> list[Row]:
    scores, target = random_values(6, 5), integers(5, 6)
    images, pixels = random_values(3, 5, 2, 4), integers(5, 3, 2, 4)
    weight = random_values(5, seed=3).abs() + 0.1
    rows: list[Row] = []
    for reduction in ("mean", "sum", "none"):
        for given, label in ((scores, target), (images, pixels), (scores[0], target[0])):
            rows.append((F.nll_loss, (given, label), {"reduction": reduction, "weight": weight, "ignore_index": 1}))
            rows.append((F.cross_entropy, (given, label), {"reduction": reduction, "ignore_index": 2}))
        rows.append((F.cross_entropy, (scores, target), {"reduction": reduction, "label_smoothing": 0.1}))
        rows.append((F.cross_entropy, (scores, scores.softmax(1)), {"reduction": reduction}))
    return rows


def _norms() -> list[Row]:
    x, channels = random_values(4, 6, 5), random_values(6, seed=1)
    mean, variance = torch.zeros(6, dtype=torch.float64), torch.ones(6, dtype=torch.float64)
    return [
        (F.layer_norm, (x, (5,), random_values(5), random_values(5, seed=2)), {}),
        (F.layer_norm, (x, (6, 5), random_values(6, 5)), {}),
        (F.rms_norm, (x, (5,), random_values(5)), {}),
        (F.group_norm, (x, 3, channels, channels * 2), {}),
        (F.batch_norm, (x, mean, variance, channels, channels * 2), {"training": False}),
        (F.batch_norm, (x, mean, variance, channels, channels * 2), {"training": True}),
        (F.batch_norm, (x, None, None), {"training": True}),
        (F.normalize, (x,), {"dim": 1}),
    ]


def _views() -> list[Row]:
    x = random_values(4, 6, 5)
    rows: list[Row] = [
        (Tensor.reshape, (x, shape), {}) for shape in ((24, 5), (4, 30), (2, 2, 6, 5), (4, 2, 3, 5), (8, 3, 5), (120,))
    ]
    rows.append((lambda t: t.transpose(0, 1).reshape(24, 5), (x,), {}))
    rows.append((lambda t: t.view(4, 2, 3, 5).permute(0, 2, 1, 3).reshape(12, 10), (x,), {}))
    rows.append((lambda t: t.unflatten(1, (3, 2)).flatten(0, 1), (x,), {}))
    return rows


def _direct() -> list[Row]:
    """Return calls of ops that functions call on other devices, without gradients, or not at all."""
    x, y, image = random_values(5, 4), random_values(5, 4, seed=1), random_values(2, 3, 4, 6)
    rows = integers(5, 3)
    return [
        (aten._fused_rms_norm, (random_values(3, 4, 5), [5], random_values(5), 1e-6), {}),
        (aten._weight_norm_interface, (x, random_values(5, 1).abs(), 0), {}),
        (aten.linear, (random_values(2, 3, 4), random_values(6, 4), random_values(6)), {}),
        (aten.max.other, (x, y), {}),
        (aten.min.other, (x, y), {}),
        (aten.argsort, (x, 0), {}),
        (aten.msort, (x,), {}),
        (aten.slice_scatter, (x, y[:2], 0, 1, 3), {}),
        (aten.slice_copy, (x, 0, 1, 4), {}),
        (aten.select_copy, (x, 0, 2), {}),
        (aten.view, (x, torch.int64), {}),
        (aten.clip, (x, -0.5, 0.5), {}),
        (aten.equal, (x, x.clone()), {}),
        (aten.positive, (x,), {}),
        (aten.relu6, (x,), {}),
        (aten._unsafe_index, (x, [rows, None]), {}),
        (aten._unsafe_index_put, (x, [rows], y[:3], True), {}),
        (aten.unsafe_split_with_sizes, (x, [2, 3]), {}),
        (aten.scatter, (x, 0, rows[:, None], 2.0), {"reduce": "add"}),
        (aten.avg_pool1d, (image[0], [2]), {}),
        (aten.adaptive_avg_pool1d, (image[0], [3]), {}),
        (aten.adaptive_avg_pool2d, (image, [2, 3]), {}),
        (aten.native_channel_shuffle, (random_values(2, 6, 3), 2), {}),
        (aten._upsample_bicubic2d_aa, (image, [3, 4], False), {}),
        (aten._int_mm, (integers(5, 5, 4).to(torch.int8), integers(5, 4, 3).to(torch.int8)), {}),
        (aten._euclidean_dist, (x, y), {}),
        (aten.nanmedian, (x,), {}),
        (aten.bincount, (rows,), {}),
        (aten.masked_select, (x, x > 0), {}),
        (aten._foreach_powsum, (_lists(1)[0], 2), {}),
        (aten.embedding_dense_backward, (random_values(3, 5, 4), integers(6, 3, 5), 6, 2, False), {}),
        (aten.embedding_dense_backward, (random_values(7, 4), integers(6, 7), 6, -1, True), {}),
    ]


OWN: dict[str, Callable[[], list[Row]]] = {
    "own:foreach": _foreach,
    "own:foreach_in_place": _foreach_in_place,
    "own:fused_optimizers": _fused,
    "own:attention": _attention,
    "own:ring_attention": _ring_attention,
    "own:embedding": _embedding,
    "own:losses": _losses,
    "own:norms": _norms,
    "own:views": _views,
    "own:direct": _direct,
}
"""The function that returns the samples of each entry, by its name."""
