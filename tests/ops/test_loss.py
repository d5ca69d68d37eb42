"""Losses: means are those of the global batch, and logits sharded by class are never gathered."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from shardwise import Partial, Shard
from tests.ops.helpers import Case, check_case, communication, no_communication, on, r, ranks, table, whole

CLASSES = 7
target = torch.tensor([0, 6, -100, 3, 3])
grid = torch.tensor([[0, 6, 3], [2, -100, 1], [3, 3, 5], [6, 0, 0], [1, 1, -100]])
weight = r(CLASSES).abs() + 0.1
probabilities = r(5, CLASSES).softmax(1)
binary = r(5, 4, dtype=torch.bool).float()
signs = binary * 2 - 1


def fixed(fn, **options):
    """The loss with operands that are no parameters, the first one aside."""
    return lambda x, *others, **more: fn(x, *(o.detach() for o in others), **options, **more)


def likelihood(x, target, weight, **options):
    return F.nll_loss(x.log_softmax(1), target, weight.detach(), **options)


LOSSES = {
    "nll": (likelihood, r(5, CLASSES), target, weight),
    "nll 2d": (fixed(F.nll_loss), r(5, CLASSES, 3, 2), grid[..., None].expand(5, 3, 2).clone(), weight),
    "nll row": (F.nll_loss, r(CLASSES), torch.tensor(3)),
    "cross_entropy": (F.cross_entropy, r(5, CLASSES), target),
    "cross_entropy 3d": (F.cross_entropy, r(5, CLASSES, 3), grid),
    "cross_entropy weight": (fixed(F.cross_entropy, ignore_index=3), r(5, CLASSES), target.clamp(0), weight),
    "cross_entropy smooth": (fixed(F.cross_entropy, label_smoothing=0.1), r(5, CLASSES), target),
    "cross_entropy smooth weight": (fixed(F.cross_entropy, label_smoothing=0.1), r(5, CLASSES), target, weight),
    "cross_entropy probabilities": (fixed(F.cross_entropy, label_smoothing=0.1), r(5, CLASSES), probabilities),
    "mse": (F.mse_loss, r(5, 4), r(5, 4, seed=1)),
    "l1": (F.l1_loss, r(5, 4), r(5, 4, seed=1)),
    "smooth_l1": (F.smooth_l1_loss, r(5, 4), r(5, 4, seed=1)),
    "huber": (F.huber_loss, r(5, 4), r(5, 4, seed=1)),
    "bce": (lambda x, *a, **k: fixed(F.binary_cross_entropy)(x.sigmoid(), *a, **k), r(5, 4), binary, r(5, 4).abs()),
    "bce logits": (
        lambda x, t, w, **k: F.binary_cross_entropy_with_logits(x, t, pos_weight=w.detach(), **k),
        *(r(5, 4), binary, r(4).abs()),
    ),
    "kl_div": (F.kl_div, r(5, CLASSES).log_softmax(1), probabilities),
    "poisson": (F.poisson_nll_loss, r(5, 4), r(5, 4).abs()),
    "cosine": (F.cosine_embedding_loss, r(5, 4), r(5, 4, seed=1), signs[:, 0].clone()),
    "margin ranking": (F.margin_ranking_loss, r(5), r(5, seed=1), signs[:, 0].clone()),
    "hinge": (fixed(F.hinge_embedding_loss), r(5, 4), signs),
    "soft margin": (fixed(F.soft_margin_loss), r(5, 4), signs),
    "triplet": (F.triplet_margin_loss, r(5, 4), r(5, 4, seed=1), r(5, 4, seed=2)),
    "multi margin": (
        lambda x, t, w, **k: F.multi_margin_loss(x, t, weight=w.detach(), **k),
        *(r(5, CLASSES), target.clamp(0), weight),
    ),
    "multilabel margin": (F.multilabel_margin_loss, r(5, CLASSES), r(5, CLASSES, dtype=torch.int64).abs() % CLASSES),
    "multilabel soft margin": (F.multilabel_soft_margin_loss, r(5, 4), binary),
}

CASES: list[Case] = [
    (f"{name} {reduction}", lambda *a, f=fn, how=reduction: f(*a, reduction=how), tuple(args))
    for name, (fn, *args) in LOSSES.items()
    for reduction in ("none", "mean", "sum")
]


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss by both")
@table(CASES)
def test_one_device_answer(fn, args) -> None:
    check_case(fn, args, limit=3, meshes=[(4,), (2, 2)])


def test_inference_mode() -> None:
    def loss(x, target):
        with torch.inference_mode():
            return F.cross_entropy(x, target, label_smoothing=0.1)

    check_case(loss, (r(5, CLASSES), target))


UNEVEN = {
    "weighted nll": lambda x, t, w: F.nll_loss(x.log_softmax(1), t, w),
    "cross_entropy, ignored targets": lambda x, t, w: F.cross_entropy(x, t),
    "cross_entropy, smooth labels": lambda x, t, w: F.cross_entropy(x, t, label_smoothing=0.1),
    "cross_entropy, smooth labels and weights": lambda x, t, w: F.cross_entropy(x, t, w, label_smoothing=0.1),
}


@pytest.mark.parametrize("name", UNEVEN)
def test_a_mean_over_an_uneven_batch(name: str) -> None:
    """Five rows on four ranks, one of them ignored: shares of 2, 2, 1 and 0 rows."""
    loss, x = UNEVEN[name], r(5, CLASSES)
    expected = loss(x, target, weight).item()
    with ranks(4) as mesh:
        found = loss(on(mesh, x, Shard(0)), on(mesh, target, Shard(0)), on(mesh, weight))
        assert found.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_logits_cut_by_class_are_not_gathered(reduction: str, smoothing: float) -> None:
    rows, classes = 64, 4096
    logits, targets = r(rows, classes), torch.arange(rows) * 60
    sizes = {"reduction": reduction, "label_smoothing": smoothing}
    expected = F.cross_entropy(logits, targets, **sizes)

    def both(x, targets):
        loss = F.cross_entropy(x, targets, **sizes)
        torch.autograd.grad(loss.sum(), x)
        return loss

    with ranks(2, 4) as mesh:
        x = on(mesh, logits, Shard(0), Shard(1), grad=True)
        rest = on(mesh, targets, Shard(0))
        said = communication(lambda: torch.testing.assert_close(whole(both(x, rest)), expected))
    assert not [text for text in said if f"{rows}" in text and f"{classes}" in text]


def test_sums_over_a_cut_batch_need_no_communication() -> None:
    with ranks(4) as mesh, no_communication():
        x = on(mesh, r(5, CLASSES), Shard(0), grad=True)
        loss = F.cross_entropy(x, on(mesh, target, Shard(0)), reduction="sum")
        assert loss.placements == (Partial("sum"),)
        error = F.mse_loss(x, on(mesh, r(5, CLASSES), Shard(0)))
        assert error.placements == (Partial("sum"),)


def test_a_target_out_of_bounds() -> None:
    with ranks(2) as mesh:
        x = on(mesh, r(5, CLASSES), Shard(1))
        with pytest.raises(IndexError, match="Target 7 is out of bounds"):
            F.nll_loss(x, on(mesh, torch.full((5,), 7)))


def test_the_mean_over_a_flattened_uneven_batch_moves_no_scores() -> None:
    # 7 rows over 4 ranks, of 5 each: the flattened dim is cut as the rows were, which no Shard says.
    scores, targets = r(7, 5, CLASSES), torch.randint(0, CLASSES, (7, 5))
    expected = F.cross_entropy(scores.flatten(0, 1), targets.flatten())
    with ranks(4) as mesh:
        x, t = on(mesh, scores, Shard(0)).flatten(0, 1), on(mesh, targets, Shard(0)).flatten()
        said = communication(lambda: torch.testing.assert_close(whole(F.cross_entropy(x, t)), expected))
    assert said == [
        "aten.nll_loss_forward.default: 1 collective(s) inside aten.nll_loss_forward.default over its sharded dim"
    ]
