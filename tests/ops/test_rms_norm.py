"""F.rms_norm stays one op and one node of autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise import Placement, Replicate, Shard
from tests.ops.helpers import check_case, on, r, ranks, table, whole

CASES: list[Any] = [
    ("with a weight", lambda x, w: F.rms_norm(x, (4,), w), (r(2, 5, 4), r(4))),
    ("without", lambda x: F.rms_norm(x, (4,), eps=1e-2), (r(2, 5, 4),)),
    ("over two dims", lambda x, w: F.rms_norm(x, (3, 4), w, 1e-3), (r(5, 3, 4), r(3, 4))),
    ("over all dims", lambda x, w: F.rms_norm(x, (3, 4), w), (r(3, 4), r(3, 4))),
    ("no rows", lambda x, w: F.rms_norm(x, (4,), w), (r(0, 4), r(4))),
    (
        "double precision",
        lambda x, w: F.rms_norm(x, (4,), w),
        (r(5, 4, dtype=torch.float64), r(4, dtype=torch.float64)),
    ),
    ("bfloat16", lambda x: F.rms_norm(x, (4,)), (r(5, 4, dtype=torch.bfloat16),)),
]


@table(CASES)
def test_one_device_answer(fn: Any, args: Any) -> None:
    check_case(fn, args, limit=12)


@pytest.mark.parametrize("placements", [[Shard(0), Shard(1)], [Shard(2), Replicate()]])
def test_gradients_of_gradients(placements: list[Placement]) -> None:
    data = r(4, 3, 6, dtype=torch.float64), r(6, dtype=torch.float64)

    def twice(x: Tensor, w: Tensor) -> list[Tensor]:
        (gradient,) = torch.autograd.grad(F.rms_norm(x, (6,), w).pow(3).sum(), x, create_graph=True)
        return list(torch.autograd.grad(gradient.pow(2).sum(), (x, w)))

    expected = twice(*(tensor.clone().requires_grad_() for tensor in data))
    with ranks(2, 2) as mesh:
        found = twice(on(mesh, data[0], *placements, grad=True), on(mesh, data[1], grad=True))
        for mine, plain in zip(found, expected, strict=True):
            torch.testing.assert_close(whole(mine), plain)


def test_the_same_placements_with_and_without_gradients() -> None:
    with ranks(4) as mesh:
        x, w = on(mesh, r(2, 8, 4), Shard(2), grad=True), on(mesh, r(4), grad=True)
        made = F.rms_norm(x, (4,), w)
        with torch.no_grad():
            assert F.rms_norm(x, (4,), w).spec is made.spec  # type: ignore[attr-defined]
        with torch.inference_mode():
            assert F.rms_norm(x, (4,), w).spec is made.spec  # type: ignore[attr-defined]


def test_shapes_that_do_not_fit_are_refused_by_the_op() -> None:
    with ranks(2) as mesh, pytest.raises(RuntimeError, match="normalized_shape"):
        F.rms_norm(on(mesh, r(2, 4), Shard(0)), (3,))
