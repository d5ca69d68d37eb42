"""What is decided once for a kind of call: its plan, and whether the hot path serves it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardwise import Replicate, Shard
from shardwise.dispatch import dispatcher
from shardwise.dispatch.hot_path import HOT
from shardwise.sharding.runtime import active_runtime
from tests.ops.helpers import on, r, ranks, whole

NEVER_HOT: dict[str, Callable[[Any], Any]] = {
    "it communicates": lambda x: x @ x.t(),
    "a number in the key of the plan": lambda x: x.norm(3.0),
    "no rule": lambda x: torch.linalg.svdvals(x),
    "decomposed": lambda x: torch.cov(x),
    "decomposed by a record": lambda x: torch.as_strided(x, (6, 2), (4, 1)),
    "a random draw": lambda x: torch.bernoulli(x.sigmoid()),
    "into another tensor": lambda x: torch.mul(x, 2, out=torch.empty_like(x)),
    "a view in other memory": lambda x: x.reshape(-1)[::2],
    "data decides the shape": lambda x: x.nonzero(),
    "a change of shape": lambda x: x.clone().t_(),
    "a list that communicates": lambda x: torch._foreach_add(
        [x, x.t()], [x.redistribute(placements=[Replicate()]), x.t()]
    ),
}


@pytest.fixture
def decisions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The decisions on calls that are made from now on."""
    made: list[str] = []

    def record(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def recorded(*args: Any) -> Any:
            made.append(name)
            return original(*args)

        monkeypatch.setattr(owner, name, recorded)

    record(dispatcher.OpDispatcher, "plan")
    record(dispatcher, "ready_call")
    return made


@pytest.mark.filterwarnings("ignore:.* has no rule")
@pytest.mark.parametrize("case", NEVER_HOT)
def test_a_call_that_cannot_be_hot_is_decided_once(case: str, decisions: list[str]) -> None:
    fn = NEVER_HOT[case]
    with ranks(2) as mesh:
        x = on(mesh, r(6, 4), Shard(0))
        fn(x)
        assert decisions
        decisions.clear()
        for _ in range(3):
            fn(x)
        assert not decisions


NUMBERS: dict[str, Callable[[Any, Any], Any]] = {
    "product": lambda x, n: x * n,
    "quotient": lambda x, n: x / n,
    "named": lambda x, n: torch.add(x, x, alpha=n),
    "in place": lambda x, n: x.clone().mul_(n),
    "of a sum": lambda x, n: x.sum(0) * n,
}


@pytest.mark.parametrize("case", NUMBERS)
def test_a_number_that_differs_between_ranks_is_decided_once(case: str, decisions: list[str]) -> None:
    """The local sizes of an uneven shard in a simulated world. Other numbers are other calls."""
    fn, value = NUMBERS[case], r(7, 4)
    with ranks(2) as mesh:
        x, y = on(mesh, value, Shard(0)), on(mesh, r(5, 4), Shard(0))
        rows, fewer = x.to_local().shape[0], y.to_local().shape[0]
        for times in range(4):
            if times == 1:
                decisions.clear()
                entries = len(HOT.of(active_runtime()))
            found = fn(x, rows)
            if case != "of a sum":
                expected = torch.cat([fn(value[:4], 4), fn(value[4:], 3)])
            else:
                expected = value[:4].sum(0) * 4 + value[4:].sum(0) * 3
            torch.testing.assert_close(whole(found), expected)
        assert not decisions
        assert len(HOT.of(active_runtime())) == entries
        if case == "product":
            torch.testing.assert_close(whole(fn(x, fewer)), torch.cat([value[:4] * 3, value[4:] * 2]))
            torch.testing.assert_close(whole(fn(x, rows / 2)), torch.cat([value[:4] * 2, value[4:] * 1.5]))
