"""Cross-entropy over sharded classes: one device's loss and gradients, and a backward pass without communication."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from shardwise import Replicate, Shard
from shardwise.debug import CommDebugMode
from shardwise.parallel import loss_parallel
from tests.ops.helpers import on, r, ranks, whole

ROWS, CLASSES = 6, 10
SCORES = r(ROWS, CLASSES, dtype=torch.float64)
TARGET = torch.tensor([0, 9, -100, 4, 2, 7])
WEIGHT = torch.rand(CLASSES, dtype=torch.float64)
LAYOUTS = [(Replicate(), Shard(1)), (Shard(0), Shard(1)), (Shard(1), Shard(1)), (Shard(1), Shard(0))]
OPTIONS = {
    "plain": {},
    "ignored": {"ignore_index": 4},
    "weighted": {"weight": WEIGHT},
    "smooth": {"label_smoothing": 0.1},
}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", OPTIONS)
def test_loss_and_gradient(name, reduction) -> None:
    options = dict(OPTIONS[name])
    target = TARGET if name != "ignored" else TARGET.clamp(min=0)
    for rows in (5, 1):  # uneven, and empty shards
        x = SCORES[:rows].clone().requires_grad_()
        loss = F.cross_entropy(x, target[:rows], reduction=reduction, **options)
        (expected,) = torch.autograd.grad(loss.sum() * 3.0, x)
        for mesh_sizes, layout in [((2, 2), layout) for layout in LAYOUTS] + [((4,), (Shard(1),))]:
            with ranks(*mesh_sizes) as mesh:
                y = on(mesh, SCORES[:rows], *layout, grad=True)
                t = on(mesh, target[:rows], *(p if p == Shard(0) else Replicate() for p in layout))
                given = {key: on(mesh, v) if key == "weight" else v for key, v in options.items()}
                found = F.cross_entropy(y, t, reduction=reduction, **given)
                torch.testing.assert_close(whole(found.detach()), loss.detach())
                (gradient,) = torch.autograd.grad(found.sum() * 3.0, y)
                torch.testing.assert_close(whole(gradient), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dtypes_and_one_row(dtype) -> None:
    for shape, target in [((ROWS, CLASSES), TARGET), ((CLASSES,), torch.tensor(3))]:
        x = r(*shape, dtype=dtype).requires_grad_()
        (expected,) = torch.autograd.grad(F.cross_entropy(x, target), x)
        with ranks(4) as mesh:
            y = on(mesh, x.detach(), Shard(-1), grad=True)
            (found,) = torch.autograd.grad(F.cross_entropy(y, on(mesh, target)), y)
            assert found.dtype == dtype
            rough = {"rtol": 0.03, "atol": 1e-3} if dtype is torch.bfloat16 else {}
            torch.testing.assert_close(whole(found), expected, **rough)


def test_all_targets_ignored() -> None:
    with ranks(4) as mesh:
        y = on(mesh, SCORES, Shard(1), grad=True)
        F.cross_entropy(y, on(mesh, torch.full((ROWS,), -100))).backward()
        assert torch.equal(whole(y.grad), torch.zeros(ROWS, CLASSES, dtype=torch.float64))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("parallel", [False, True], ids=["alone", "loss_parallel"])
def test_the_backward_pass_communicates_nothing(reduction, parallel) -> None:
    for layout, options in itertools.product(LAYOUTS[:3], [{}, {"ignore_index": 4}, {"weight": WEIGHT}]):
        with ranks(2, 2) as mesh:
            x = on(mesh, SCORES, *layout, grad=True)
            t = on(mesh, TARGET.clamp(min=0), *(p if p == Shard(0) else Replicate() for p in layout))
            options = {key: on(mesh, v) if key == "weight" else v for key, v in options.items()}
            with CommDebugMode() as forward:
                if parallel:
                    with loss_parallel():
                        loss = F.cross_entropy(x, t, reduction=reduction, **options)
                else:
                    loss = F.cross_entropy(x, t, reduction=reduction, **options)
            # Maxima and sums of exponentials, and the losses: a few numbers for each row at most.
            assert forward.get_total_counts() <= 2
            with CommDebugMode() as backward:
                loss.sum().backward()
            assert backward.get_total_counts() == 0
            assert x.grad.placements == x.placements


def test_gradients_of_gradients() -> None:
    def twice(x, target):
        (gradient,) = torch.autograd.grad(F.cross_entropy(x, target), x, create_graph=True)
        return torch.autograd.grad(gradient.pow(2).sum(), x)[0]

    expected = twice(SCORES.clone().requires_grad_(), TARGET)
    with ranks(2, 2) as mesh:
        for layout in LAYOUTS:
            found = twice(on(mesh, SCORES, *layout, grad=True), on(mesh, TARGET))
            torch.testing.assert_close(whole(found), expected)


def recomputed(x, target):
    return checkpoint(F.cross_entropy, x, target, use_reentrant=False)


def halves(x, target):
    with torch.autocast("cpu", torch.bfloat16):
        return F.cross_entropy(x, target)


def per_sample(x, target):
    return torch.func.vmap(F.cross_entropy)(x, target)


@pytest.mark.parametrize("run", [recomputed, halves, per_sample])
def test_under_others(run) -> None:
    x, target = SCORES.float(), TARGET.clamp(min=0)
    expected = run(x, target)
    with ranks(4) as mesh:
        found = run(on(mesh, x, Shard(1), grad=True), on(mesh, target))
        torch.testing.assert_close(whole(found.detach()), expected)
