"""Softmax and logsumexp: a cut dim is merged by maximum and sum of exponentials, never gathered."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from shardwise import Shard
from tests.ops.helpers import Case, check_case, communication, no_communication, on, r, ranks, table, whole
from tests.ops.test_reduce import special

BF16 = torch.bfloat16


def masked() -> torch.Tensor:
    return torch.where(torch.arange(4) > 2, -torch.inf, r(5, 4))


CASES: list[Case] = [
    ("softmax", lambda x: x.softmax(1), (r(5, 4),)),
    ("softmax first dim", lambda x: x.softmax(0), (r(5, 4, 2),)),
    ("softmax 0-dim", lambda x: x.softmax(0), (r(),)),
    ("softmax special", lambda x: x.softmax(1).detach(), (special(),)),
    ("softmax bf16", lambda x: x.softmax(1), (r(5, 4, dtype=BF16),)),
    ("softmax to f32", lambda x: x.softmax(1, dtype=torch.float32), (r(5, 4, dtype=BF16),)),
    ("softmin", lambda x: F.softmin(x, 0), (r(5, 4),)),
    ("log_softmax", lambda x: x.log_softmax(-1), (r(5, 4),)),
    ("log_softmax special", lambda x: x.log_softmax(1).detach(), (special(),)),
    ("log_softmax large", lambda x: (x * 1e4).log_softmax(0).detach(), (r(5, 4),)),
    ("safe softmax", lambda x: torch._safe_softmax(x, 0), (masked(),)),
    ("logsumexp", lambda x: x.logsumexp(0), (r(5, 4),)),
    ("logsumexp dims", lambda x: x.logsumexp((0, 2), True), (r(5, 4, 3),)),
    ("logsumexp special", lambda x: x.logsumexp(1).detach(), (special(),)),
    ("logsumexp int", lambda x: x.logsumexp(0), (r(5, 4, dtype=torch.int64),)),
]


@table(CASES)
def test_one_device_answer(fn, args) -> None:
    check_case(fn, args, limit=10)


def test_inference_mode() -> None:
    def softmax(x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return x.softmax(1)

    check_case(softmax, (r(5, 4),))


@pytest.mark.parametrize("fn", [torch.softmax, torch.log_softmax])
def test_a_cut_batch_needs_no_communication(fn) -> None:
    x = r(5, 4)
    with ranks(4) as mesh:
        with no_communication():
            cut = on(mesh, x, Shard(0), grad=True)
            result = fn(cut, 1)
            (gradient,) = torch.autograd.grad(result, cut, result.detach())
        assert gradient.placements == (Shard(0),)
        torch.testing.assert_close(whole(result), fn(x, 1))


@pytest.mark.parametrize("fn", [torch.softmax, torch.log_softmax])
def test_a_cut_dim_is_not_gathered(fn) -> None:
    def both(x) -> None:
        result = fn(x, 1)
        torch.autograd.grad(result, x, result.detach())

    with ranks(4) as mesh:
        x = on(mesh, r(16, 128), Shard(1), grad=True)
        said = communication(lambda: both(x))
    assert len(said) == 2  # one for each direction
    assert all("1 collective(s) inside" in text for text in said)


def test_complex_logsumexp() -> None:
    """Complex numbers have no maximum to take off."""
    check_case(lambda x: torch.logsumexp(x, (0, 2)), (r(5, 2, 3, dtype=torch.complex64),))
