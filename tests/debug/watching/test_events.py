"""Events of ops and collectives: the same for the same calls, whatever tools one rank runs."""

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise import DTensor, Replicate, Shard, distribute_tensor
from shardwise.debug.watching import collective_events, op_events
from shardwise.debug.watching.hooks import Hooks
from shardwise.debug.watching.journal import Journal
from shardwise.debug.watching.stream import Stream
from shardwise.dispatch.observe import LOOKUPS
from shardwise.sharding.runtime import clear_all_caches, runtime_of_world
from tests.worlds import lone_rank


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.call(func, args, kwargs or {})

    def call(self, func, args, kwargs):
        return func(*args, **kwargs)


@contextmanager
def hooked(meet: Callable[[Stream], None] = lambda stream: None) -> Iterator[Journal]:
    journal = Journal(0)
    hooks = Hooks(journal)
    hooks.install(lambda: None, meet)
    try:
        yield journal
    finally:
        hooks.remove()


def taken(journal: Journal) -> list[int]:
    """The events since the last call."""
    found = []
    for stream in journal.streams.values():
        before = stream.count
        stream.roll()
        found += stream.events_from(before)[1] if stream.count > before else []
    return found


def sharded(mesh):
    return distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)], src_data_rank=None)


def test_profilers_modes_and_empty_caches_do_not_change_events() -> None:
    with lone_rank() as mesh:
        x = sharded(mesh)
        weight = torch.nn.ReLU()

        def step() -> None:
            y = x * 2
            weight(y)
            torch.ops.aten.neg.default(y)
            y.redistribute(placements=[Replicate()])

        with hooked() as journal:
            step()
            expected = taken(journal)
            assert len(expected) == 4
            for _ in range(3):
                step()
                assert taken(journal) == expected
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
                step()
            assert taken(journal) == expected
            with Passing():
                step()
            assert taken(journal) == expected
            clear_all_caches()
            step()
            assert taken(journal) == expected
        with hooked() as journal, Passing():  # the same from the beginning on
            step()
            assert taken(journal) == expected
        step()
        assert LOOKUPS.present == ()


def test_calls_from_two_places_are_two_events_and_each_has_its_line() -> None:
    with lone_rank() as mesh, hooked() as journal:
        x = sharded(mesh)
        taken(journal)
        one = lambda: x * 2  # noqa: E731
        other = lambda: x * 2  # noqa: E731
        one(), other(), one(), other()
        first, second, *again = taken(journal)
        assert first != second
        assert again == [first, second]
        assert "one = lambda" in journal.lookup(first).line
        assert "other = lambda" in journal.lookup(second).line


def test_ops_that_a_library_calls_first_are_compared_without_a_place() -> None:
    with lone_rank() as mesh, hooked() as journal:
        x = sharded(mesh)
        taken(journal)
        torch.nn.ReLU()(x)
        x.relu()
        torch.relu(x)
        assert len(set(taken(journal))) == 1


def test_collectives_from_two_lines_are_two_events() -> None:
    with lone_rank() as mesh, hooked() as journal:
        x = sharded(mesh)
        taken(journal)
        for _ in range(2):
            x.full_tensor()
            x.full_tensor()
        first, second, *again = taken(journal)
        assert first != second
        assert again == [first, second]
        dist.all_reduce(torch.ones(3))
        dist.all_reduce(tensor=torch.ones(3), group=dist.group.WORLD)
        dist.all_reduce(torch.ones(4), dist.ReduceOp.MAX, dist.group.WORLD)
        words = [journal.lookup(event).what for event in taken(journal)]
        assert [text.partition(" among")[0] for text in words] == [
            "dist.all_reduce of float32[3]",
            "dist.all_reduce of float32[3]",
            "dist.all_reduce of float32[4]",
        ]


def test_lines_of_one_collective_are_told_apart_however_deep_they_are() -> None:
    with lone_rank() as mesh:
        x = sharded(mesh)

        class Gather(torch.nn.Module):
            def forward(self, tensor):
                return tensor.full_tensor()

        nested = torch.nn.Sequential(torch.nn.Sequential(Gather()))
        ways = {
            "return tensor.full_tensor()": lambda: nested(x),
            "x.redistribute(": lambda: x.redistribute(placements=[Replicate()]).to_local(),
            "torch.neg(x.full_tensor())": lambda: torch.neg(x.full_tensor()),
        }
        fresh = {}
        for name, way in ways.items():
            with hooked() as journal:
                way()
                (fresh[name],) = taken(journal)
                assert name in journal.lookup(fresh[name]).line
        assert len({*fresh.values()}) == len(ways)
        with hooked() as journal:
            order = random.Random(0).choices([*ways], k=60)
            for name in order:
                ways[name]()
            assert taken(journal) == [fresh[name] for name in order]


def test_what_ranks_have_met_at_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cleared at an event, not at a time, so that all ranks wait for each other at the same events."""
    monkeypatch.setattr(collective_events, "_MOST_MET", 4)

    def all_reduce(size: int) -> None:
        dist.all_reduce(torch.ones(size))

    with lone_rank():
        met: list[int] = []
        with hooked(lambda stream: met.append(size)) as journal:
            for size in (1, 2, 3, 4, 1, 2, 5, 5, 1, 4, 5):
                all_reduce(size)
                assert all(len(stream.met) <= 4 for stream in journal.streams.values())
        assert met == [1, 2, 3, 4, 5, 1, 4]


def test_specs_of_local_tensors_are_bounded_and_keep_their_events() -> None:
    with lone_rank() as mesh, hooked() as journal:

        def make(size: int) -> None:
            DTensor.from_local(torch.ones(size), mesh, [Shard(0)])

        make(1)
        (first,) = taken(journal)
        cache = op_events._MADE.of(runtime_of_world())
        cache.max_bytes = 4096
        for size in range(2, 100):
            make(size)
        assert len(cache) < 10
        taken(journal)
        make(1)
        assert taken(journal) == [first]


def test_a_rank_outside_a_group_does_nothing_there() -> None:
    with lone_rank(), hooked() as journal:
        group = dist.new_group([1, 2])
        assert len(taken(journal)) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch warns, too
            dist.all_reduce(torch.ones(3), group=group)
            dist.barrier(group)
        assert taken(journal) == []
