"""Random numbers: the same whole tensor for one seed, whatever is cut, and a generator that ends up in one state."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise import Partial, Replicate, Shard
from tests.ops.helpers import check_case, no_communication, on, r, ranks, table, whole

x = r(5, 6)

DRAWS: list[Any] = [
    ("uniform_", lambda t: t.clone().uniform_(2, 3)),
    ("normal_", lambda t: t.clone().normal_(1, 2)),
    ("exponential_", lambda t: t.clone().exponential_(2)),
    ("log_normal_", lambda t: t.clone().log_normal_()),
    ("cauchy_", lambda t: t.clone().cauchy_()),
    ("geometric_", lambda t: t.clone().geometric_(0.3)),
    ("bernoulli_", lambda t: t.clone().bernoulli_(0.4)),
    ("bernoulli_ with a tensor", lambda t: t.clone().bernoulli_(t.sigmoid())),
    ("bernoulli", lambda t: torch.bernoulli(t.sigmoid())),
    ("random_", lambda t: t.clone().random_()),
    ("random_ in a range", lambda t: t.clone().random_(3, 9)),
    ("rand_like", torch.rand_like),
    ("randn_like", torch.randn_like),
    ("randint_like", lambda t: torch.randint_like(t, 5, 10)),
    ("normal of tensors", lambda t: torch.normal(t, t.abs())),
    ("normal around", lambda t: torch.normal(t, 1.0)),
    ("dropout", lambda t: F.dropout(t, 0.5)),
    ("alpha_dropout", lambda t: F.alpha_dropout(t, 0.5, True)),
    ("poisson", lambda t: torch.poisson(t.abs())),
    ("multinomial", lambda t: torch.multinomial(t.abs(), 2)),
]


def values(fn: Any, tensor: Tensor) -> list[tuple[Tensor, Tensor]]:
    """What is drawn from one seed for every placement, and the number that plain torch draws next."""
    found = []
    for sizes in ((4,), (2, 2)):
        with ranks(*sizes) as mesh:
            for placements in itertools.product((Replicate(), Shard(0), Shard(1)), repeat=len(sizes)):
                given = on(mesh, tensor, *placements)
                torch.manual_seed(5)
                found.append((whole(fn(given)).clone(), torch.rand(())))
    return found


@pytest.mark.parametrize("fn", [draw for _, draw in DRAWS], ids=[name for name, _ in DRAWS])
def test_placements_do_not_change_what_is_drawn(fn: Any) -> None:
    (first, following), *rest = values(fn, x)
    assert len(first.unique()) > 1
    for value, after in rest:
        torch.testing.assert_close(value, first, rtol=1e-6, atol=1e-6)
        assert after == following


def test_half_precision() -> None:
    (first, _), *rest = values(torch.rand_like, x.bfloat16())
    assert first.dtype is torch.bfloat16
    assert all(torch.equal(value, first) for value, _ in rest)
    assert (first < 1).all()


def test_a_generator_is_honoured() -> None:
    with ranks(2) as mesh:
        given = on(mesh, x, Shard(0))
        state = torch.get_rng_state()
        drawn = [whole(given.clone().uniform_(generator=torch.Generator().manual_seed(s))) for s in (3, 3, 4)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert torch.equal(torch.get_rng_state(), state)


def test_distributions() -> None:
    with ranks(2) as mesh:
        given = on(mesh, torch.zeros(200, 100), Shard(0))
        normal, uniform = whole(torch.randn_like(given)), whole(torch.rand_like(given))
        chosen = whole(torch.bernoulli(on(mesh, torch.full((200, 100), 0.3), Shard(1))))
        waited = whole(given.clone().exponential_(2.0))
    assert abs(normal.mean()) < 0.03
    assert abs(normal.std() - 1) < 0.03
    assert abs(uniform.mean() - 0.5) < 0.01
    assert abs(chosen.mean() - 0.3) < 0.02
    assert abs(waited.mean() - 0.5) < 0.02


def test_dropout_is_the_same_with_and_without_gradients_and_needs_no_communication() -> None:
    with ranks(4) as mesh:
        given = on(mesh, x, Shard(0))
        found = []
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            torch.manual_seed(2)
            with mode(), no_communication():
                found.append(whole(F.dropout(given, 0.5)))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert set((found[0] / x).round(decimals=4).unique().tolist()) == {0.0, 2.0}


def test_dropout_has_gradients() -> None:
    with ranks(2) as mesh:
        given = on(mesh, x, Shard(1), grad=True)
        result = F.dropout(given, 0.5)
        result.backward(torch.ones_like(result))
        assert given.grad is not None
        torch.testing.assert_close(whole(given.grad) * x, whole(result))


def test_drawing_into_out() -> None:
    with ranks(2) as mesh:
        drawn = []
        for placement in (Replicate(), Shard(0), Partial()):
            target, chance = on(mesh, x, placement), on(mesh, x.sigmoid(), Shard(1))
            torch.manual_seed(0)
            torch.bernoulli(chance, out=target)
            drawn.append(whole(target))
        assert drawn[0].unique().tolist() == [0.0, 1.0]
        assert all(torch.equal(value, drawn[0]) for value in drawn[1:])


def test_partial_tensors_are_filled_whole() -> None:
    with ranks(2) as mesh:
        drawn = []
        for placement in (Replicate(), Partial()):
            torch.manual_seed(0)
            drawn.append(whole(on(mesh, x, placement).uniform_()))
        torch.testing.assert_close(drawn[1], drawn[0])


OFF: list[Any] = [
    ("no dropout", lambda t: F.dropout(t, 0.5, False), (x,)),
    ("p = 0", lambda t: F.dropout(t, 0.0), (x,)),
]


@table(OFF)
def test_what_draws_nothing(fn: Any, args: Any) -> None:
    check_case(fn, args, limit=4, meshes=((2,),))
