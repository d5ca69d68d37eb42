"""Losses over sharded classes are right and never gather the scores, on meshes of any number of axes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh, simulate
from shardwise.debug import CommDebugMode
from shardwise.parallel import loss_parallel
from tests.parallel.models import first
from tests.processes.pool import on_processes

CLASSES = 203  # on 4 ranks: 51, 51, 51, 50
OPTIONS = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smoothed": {"label_smoothing": 0.1},
    "weighted": {"weight": True, "ignore_index": 3},
    "all": {"weight": True, "ignore_index": 3, "label_smoothing": 0.2, "reduction": "mean"},
    "probabilities": {"probabilities": True},
    "probabilities, all": {"probabilities": True, "weight": True, "label_smoothing": 0.2, "reduction": "none"},
}
MESHES = {
    "tp": ((4,), [Shard(1)]),
    "dp x tp": ((2, 2), [Shard(0), Shard(1)]),
    "tp x dp": ((2, 2), [Shard(1), Shard(0)]),
    "both axes": ((2, 2), [Shard(1), Shard(1)]),
}


def follows_one_device(mesh, placements, shape, options, parallel) -> None:
    options = dict(options)
    scores, weight = torch.randn(shape), torch.rand(CLASSES)
    rows = (*shape[:1], *shape[2:])
    if options.pop("probabilities", False):
        target, places = torch.randn(shape).softmax(1), placements
    else:
        target = torch.randint(0, CLASSES, rows)
        target.view(-1)[0] = 3
        places = [Replicate() if p.is_shard(1) else Shard(1) if p.is_shard(2) else p for p in placements]
    alone_options = options | ({"weight": weight} if "weight" in options else {})
    alone = scores.clone().requires_grad_()
    expected = F.cross_entropy(alone, target, **alone_options)
    back = torch.randn(expected.shape)
    expected.backward(back)

    everywhere = [Replicate()] * mesh.ndim
    if "weight" in options:
        options["weight"] = distribute_tensor(weight, mesh, everywhere)
    cut = distribute_tensor(scores, mesh, placements).requires_grad_()
    given = distribute_tensor(target, mesh, places)
    with CommDebugMode() as comm:
        if parallel:
            with loss_parallel():
                loss = F.cross_entropy(cut, given, **options)
        else:
            loss = F.cross_entropy(cut, given, **options)
    torch.testing.assert_close(first(loss), expected.detach())
    if parallel:
        on_classes = [of for of, cut in zip(loss.placements, placements, strict=True) if cut.is_shard(1)]
        assert set(on_classes) == {Replicate()}
    cotangent = distribute_tensor(back, mesh, everywhere)
    with CommDebugMode() as back_comm:
        loss.backward(cotangent)
    torch.testing.assert_close(first(cut.grad), alone.grad)
    assert cut.grad.placements == cut.placements
    # A few numbers for each row travel, never its scores.
    held = cut.to_local().numel() * 4 if not hasattr(cut.to_local(), "shards") else cut.to_local().shards[0].numel() * 4
    assert all(collective.received < held for collective in [*comm.collectives, *back_comm.collectives])


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("options", OPTIONS)
def test_cross_entropy(options, mesh, parallel) -> None:
    sizes, placements = MESHES[mesh]
    with simulate(4):
        follows_one_device(init_device_mesh("cpu", sizes), placements, (6, CLASSES), OPTIONS[options], parallel)


@pytest.mark.parametrize("options", ["mean", "none", "all"])
def test_cross_entropy_of_sequences(options) -> None:
    with simulate(4):
        mesh = init_device_mesh("cpu", (2, 2))
        follows_one_device(mesh, [Shard(2), Shard(1)], (3, CLASSES, 4), OPTIONS[options], False)


@pytest.mark.parametrize("parallel", [False, True])
@on_processes
def test_cross_entropy_on_processes(parallel) -> None:
    for name in ("mean", "none", "all"):
        for sizes, placements in (MESHES["tp"], MESHES["dp x tp"]):
            follows_one_device(init_device_mesh("cpu", sizes), placements, (6, CLASSES), OPTIONS[name], parallel)


def test_loss_parallel_takes_plain_targets_and_weights_and_completes_the_loss() -> None:
    scores, target, weight = torch.randn(4, 10), torch.randint(0, 10, (4,)), torch.rand(10)
    with simulate(4):
        mesh = init_device_mesh("cpu", (4,))
        cut = distribute_tensor(scores, mesh, [Shard(1)])
        for reduction in ("none", "sum", "mean"):
            with loss_parallel():
                loss = nn.CrossEntropyLoss(weight, reduction=reduction)(cut, target)
            assert loss.placements == (Replicate(),)
            expected = F.cross_entropy(scores, target, weight, reduction=reduction)
            torch.testing.assert_close(loss.to_local().shards[0], expected)


def test_loss_parallel_leaves_sums_over_other_axes_open() -> None:
    with simulate(4):
        mesh = init_device_mesh("cpu", (2, 2))
        cut = distribute_tensor(torch.randn(4, 10), mesh, [Shard(0), Shard(1)])
        target = distribute_tensor(torch.randint(0, 10, (4,)), mesh, [Shard(0), Replicate()])
        with loss_parallel():
            assert F.cross_entropy(cut, target, reduction="sum").placements == (Partial(), Replicate())
            assert F.cross_entropy(cut, target, reduction="none").placements == (Shard(0), Replicate())


def test_other_functions_and_plain_tensors_are_left_alone() -> None:
    scores, target = torch.randn(4, 10), torch.randint(0, 10, (4,))
    with loss_parallel():
        loss: Tensor = F.cross_entropy(scores, target)
        assert not isinstance(loss, DTensor)
        assert torch.equal(scores + 1, scores.add(1))
