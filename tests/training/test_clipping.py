"""Gradients clipped by their norm: one number for all, however and wherever they are cut."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise import DTensor, Partial
from shardwise.errors import CommunicationError, MeshError, MixedTensorError
from tests.ops.helpers import on as cut_on
from tests.training.parameters import EVERY_KIND, ONE_MESH, Kind, at_home, leaves, meshes, same, values, whole_of

PLAIN: Kind = ((3, 2), None)
SETS: dict[str, list[Kind]] = {
    "one mesh": ONE_MESH,
    "plain ones, too": [PLAIN, *ONE_MESH],
    "replicated and plain": [((3,), ("square", (same, same))), PLAIN],
    "two meshes": [kind for kind in EVERY_KIND if kind[1] is not None],
    "every kind": EVERY_KIND,
}


def with_gradients(kinds: list[Kind], on: Any, last: float | None = None) -> list[nn.Parameter]:
    params = leaves(kinds, values(kinds, 0, torch.float64), on)
    gradients = values(kinds, 1, torch.float64)
    if last is not None:
        gradients[0].view(-1)[-1] = last  # on one rank alone
    for param, gradient, (_, home) in zip(params, gradients, kinds, strict=True):
        param.grad = gradient if on is None else at_home(gradient, home, on)
    return params


def assert_same_gradients(many: list[nn.Parameter], one: list[nn.Parameter]) -> None:
    for a, b in zip(many, one, strict=True):
        torch.testing.assert_close(whole_of(a.grad), b.grad, equal_nan=True)
        assert type(a.grad) is type(a.data)
        if isinstance(a, DTensor):
            assert a.grad.placements == a.placements


ORDERS = [2.0, 1.0, math.inf, 3, 0.5, -math.inf, 0.0]
CASES = [*(("every kind", order) for order in ORDERS), *((name, 2.0) for name in SETS if name != "every kind")]


@pytest.mark.parametrize(("name", "order"), CASES)
def test_the_norm_of_all_gradients(name: str, order: float) -> None:
    kinds = SETS[name]
    with meshes() as on:
        for foreach in (None, True, False):
            one, many = with_gradients(kinds, None), with_gradients(kinds, on)
            wanted = nn.utils.clip_grad_norm_(one, 1.0, order, foreach=foreach)
            found = nn.utils.clip_grad_norm_(many, 1.0, order, foreach=foreach)
            assert found.shape == ()
            assert found.item() == pytest.approx(wanted.item(), rel=1e-9)
            assert_same_gradients(many, one)


def test_on_several_meshes_the_norm_is_a_plain_tensor() -> None:
    with meshes() as on:
        assert not isinstance(nn.utils.clip_grad_norm_(with_gradients(EVERY_KIND, on), 1.0), DTensor)
        norm = nn.utils.clip_grad_norm_(with_gradients(ONE_MESH, on), 1.0)
        assert isinstance(norm, DTensor)
        assert norm.placements == (same, same)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_is_not_finite_on_one_rank_is_known_to_all(bad: float) -> None:
    with meshes() as on:
        with pytest.raises(RuntimeError, match="non-finite"):
            nn.utils.clip_grad_norm_(with_gradients(EVERY_KIND, on, bad), 1.0, error_if_nonfinite=True)
        one, many = with_gradients(EVERY_KIND, None, bad), with_gradients(EVERY_KIND, on, bad)
        assert str(nn.utils.clip_grad_norm_(many, 1.0).item()) == str(nn.utils.clip_grad_norm_(one, 1.0).item())
        assert_same_gradients(many, one)


def test_in_two_steps() -> None:
    with meshes() as on:
        one, many = with_gradients(EVERY_KIND, None), with_gradients(EVERY_KIND, on)
        for params in (one, many):
            norm = nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
            nn.utils.clip_grads_with_norm_(params, 0.5, norm)
        assert_same_gradients(many, one)


@pytest.mark.parametrize("foreach", [None, True, False])
def test_by_value(foreach: bool | None) -> None:
    with meshes() as on:
        one, many = with_gradients(EVERY_KIND, None), with_gradients(EVERY_KIND, on)
        for params in (one, many):
            nn.utils.clip_grad_value_(params, 0.3, foreach)
        assert_same_gradients(many, one)


# ---- numbers: what lets gradients of several meshes have one norm ----------------------------------------------------


def test_a_value_without_dims_meets_plain_tensors_and_other_meshes() -> None:
    whole = torch.arange(6.0).view(3, 2)
    with meshes() as on:
        number, elsewhere = cut_on(on["line"], torch.tensor(2.0), Partial()), cut_on(on["square"], whole)
        for other in (whole, elsewhere):
            torch.testing.assert_close(whole_of_either(other * number), whole * 2)
            torch.testing.assert_close(whole_of_either(torch.where(number > 1, other, 0.0)), whole)
        plain = whole.clone()
        plain.mul_(number)
        assert torch.equal(plain, whole * 2)
        assert not isinstance(whole * number, DTensor)


def whole_of_either(value: Tensor) -> Tensor:
    return shardwise.world.common(whole_of(value))


def test_but_not_where_gradients_are_needed() -> None:
    with meshes() as on:
        number = cut_on(on["line"], torch.tensor(2.0), grad=True)
        with pytest.raises(MixedTensorError):
            torch.ones(3) * number
        with pytest.raises(MeshError):
            cut_on(on["square"], torch.ones(3)) * number


def test_reducing_it_is_communication() -> None:
    with meshes() as on, shardwise.explicit():
        number = cut_on(on["line"], torch.tensor(2.0))
        assert torch.equal(whole_of_either(torch.ones(3) * number), torch.full((3,), 2.0))
        with pytest.raises(CommunicationError, match="reduced"):
            torch.ones(3) * cut_on(on["line"], torch.tensor(2.0), Partial())
