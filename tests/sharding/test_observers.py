"""Observers: they are called while they are there, and leave nothing behind."""

from contextlib import contextmanager

import pytest
import torch

from shardwise import DTensor, Replicate, Shard, distribute_tensor
from shardwise.comm.redistribute import REDISTRIBUTIONS
from shardwise.dispatch.observe import LOOKUPS, OPS
from shardwise.random.draw import DRAWS
from shardwise.sharding.observers import Observers
from shardwise.tensor.from_local import LOCAL_TENSORS
from tests.worlds import lone_rank


def test_observers_are_called_in_order_and_removed_once() -> None:
    events: Observers[[int], None] = Observers()
    changes, seen = [], []
    events.on_change(lambda: changes.append(len(events.present)))

    def observer(number: int) -> None:
        seen.append(number)

    first, second = events.add(observer), events.add(observer)
    events.notify(1)
    second()
    second()
    events.notify(2)
    first()
    events.notify(3)
    assert (seen, changes) == ([1, 1, 2], [1, 2, 1, 0])


def test_contexts_are_left_in_reverse_and_when_another_observer_raises() -> None:
    events: Observers[[str], object] = Observers()
    seen = []

    def named(name):
        @contextmanager
        def observer(event):
            seen.append(f"enter {name} {event}")
            yield
            seen.append(f"leave {name}")

        return observer

    with events.observing(named("a")), events.observing(lambda event: None), events.observing(named("b")):
        with events.around("x"):
            seen.append("x")
        assert seen == ["enter a x", "enter b x", "x", "leave b", "leave a"]

    @contextmanager
    def outer(event):
        try:
            yield
        finally:
            seen.append("left")

    def fails(event):
        raise ValueError(event)

    with events.observing(outer), events.observing(fails), pytest.raises(ValueError, match="y"), events.around("y"):
        pass
    assert seen[-1] == "left"
    assert events.present == ()


def test_each_kind_of_event_is_observed_and_costs_nothing_afterwards() -> None:
    with lone_rank() as mesh:
        x = distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)], src_data_rank=None)
        unobserved = DTensor.__torch_dispatch__
        seen: dict[str, list] = {"op": [], "key": [], "move": [], "draw": [], "local": []}

        def keys(look_up):
            def observed(key):
                seen["key"].append(key)
                return look_up(key)

            return observed

        def run() -> None:
            x + x
            x.redistribute(placements=[Replicate()])
            torch.rand_like(x)
            DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])

        run()
        with (
            OPS.observing(lambda *call: seen["op"].append(call)),
            LOOKUPS.observing(keys),
            REDISTRIBUTIONS.observing(lambda *pair: seen["move"].append(pair)),
            DRAWS.observing(lambda *draw: seen["draw"].append(draw)),
            LOCAL_TENSORS.observing(seen["local"].append),
        ):
            assert DTensor.__torch_dispatch__ is not unobserved
            run()
        counts = {kind: len(events) for kind, events in seen.items()}
        assert counts == {"op": counts["op"], "key": counts["op"], "move": 1, "draw": 1, "local": 1}
        assert next(str(func) for func, *_ in seen["op"]) == "aten.add.Tensor"
        run()
        assert {kind: len(events) for kind, events in seen.items()} == counts
        assert DTensor.__torch_dispatch__ is unobserved
