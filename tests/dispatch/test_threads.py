"""Modes belong to the thread that enters them, and several threads may compute on one mesh."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwise
from shardwise import DTensor, Replicate, Shard
from shardwise.debug import CommDebugMode, explain
from shardwise.dispatch.modes import modes
from shardwise.dispatch.observe import OPS
from shardwise.dispatch.watch import mark_exposed
from shardwise.dispatch.writes import Counter, count_writes_through, watch
from shardwise.errors import CommunicationError, MixedTensorError
from shardwise.tensor.sources import pending
from tests.ops.helpers import on, r, ranks, whole

X, Y = r(6, 4), r(6, 4, seed=1)


def in_thread(run: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


CONTEXTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "explicit": shardwise.explicit,
    "implicit_replication": shardwise.implicit_replication,
    "strict_ops": shardwise.strict_ops,
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_other_threads_do_not_see_a_mode(name: str) -> None:
    with CONTEXTS[name]():
        assert getattr(modes, name)
        assert not in_thread(lambda: getattr(modes, name))
    assert not getattr(modes, name)


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_mode_entered_in_a_thread_stays_there(name: str) -> None:
    entered, left = threading.Event(), threading.Event()

    def run() -> bool:
        with CONTEXTS[name]():
            entered.set()
            left.wait(30)
            return bool(getattr(modes, name))

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run)
        assert entered.wait(30)
        assert not getattr(modes, name)
        left.set()
        assert running.result()


def test_modes_nest_and_end_with_an_error() -> None:
    def fail() -> None:
        with shardwise.explicit(False):
            assert not modes.explicit
            assert modes.implicit_replication
        assert modes.explicit
        raise KeyError

    with pytest.raises(KeyError), shardwise.explicit(), shardwise.implicit_replication():
        fail()
    assert not modes.explicit
    assert not modes.implicit_replication


def test_a_backward_pass_has_the_modes_of_the_thread_that_starts_it() -> None:
    """Not those of the thread that ran the forward."""
    seen: list[bool] = []

    def hook(gradient: Any) -> None:
        seen.append(modes.explicit)

    with ranks(2) as mesh:
        x = on(mesh, X, Shard(0), grad=True)
        with shardwise.explicit():
            y = x * 2
            y.register_hook(hook)
            in_thread(lambda: y.sum().backward(retain_graph=True))
            y.sum().backward()
    assert seen == [False, True]


def test_a_backward_pass_in_another_thread_is_not_excused() -> None:
    with ranks(2) as mesh:
        x = on(mesh, X, Shard(0), grad=True)
        y = x * 2
        y.register_hook(lambda gradient: gradient * torch.ones(6, 4))
        with shardwise.implicit_replication(), pytest.raises(MixedTensorError):
            in_thread(lambda: y.sum().backward())


def test_what_was_accepted_in_one_thread_is_accepted_in_the_backward_of_another() -> None:
    with ranks(2) as mesh:
        x = on(mesh, X, Shard(0), grad=True)
        with shardwise.implicit_replication():
            y = (x * Y).cumprod(0)
        in_thread(lambda: y.sum().backward())
        one = X.clone().requires_grad_()
        (one * Y).cumprod(0).sum().backward()
        assert one.grad is not None
        torch.testing.assert_close(whole(x.grad), one.grad)


def test_accumulate_gradients_belongs_to_its_thread() -> None:
    with ranks(2) as mesh:
        w = on(mesh, r(4, 4), Replicate(), grad=True)
        x = on(mesh, X, Shard(0))
        with shardwise.accumulate_gradients():
            in_thread(lambda: (x @ w).sum().backward())
            assert w.grad is not None
            assert w.grad.placements == (Replicate(),)
            w.grad = None
            (x @ w).sum().backward()
            assert w.grad.placements == (shardwise.Partial(),)


def test_one_thread_is_explicit_while_another_communicates() -> None:
    with ranks(2) as mesh:
        x, y = on(mesh, X, Shard(0)), on(mesh, Y, Shard(1))
        with shardwise.explicit():
            torch.testing.assert_close(whole(in_thread(lambda: x + y)), X + Y)
            with pytest.raises(CommunicationError):
                x + y


def test_eight_threads_compute_on_one_mesh() -> None:
    """Each trains on its own data, with shapes and placements that others meet at the same time."""

    def train(x: Any, w: Any) -> list[Any]:
        found: list[Any] = []
        for step in range(6):
            rows = x[: 2 + step]
            y = F.linear(F.layer_norm(rows, (4,)), w).softmax(-1) @ w
            loss = (y.cumprod(0) + rows[[0, 1]].sum(0)).square().sum()
            found.append(torch.autograd.grad(loss, w)[0])
        return found

    data = [(r(8, 4, seed=seed).double(), r(4, 4, seed=seed + 50).double()) for seed in range(8)]
    wanted = [train(x, w.clone().requires_grad_()) for x, w in data]
    with ranks(2, 2) as mesh:
        placements = [(Shard(0), Replicate()), (Shard(1), Shard(0)), (Replicate(), Shard(1)), (Shard(0), Shard(0))]
        given = [
            (on(mesh, x, *placements[seed % 4]), on(mesh, w, *placements[(seed + 1) % 4], grad=True))
            for seed, (x, w) in enumerate(data)
        ]
        barrier = threading.Barrier(8)

        def run(pair: tuple[Any, Any]) -> list[Any]:
            barrier.wait(30)
            return train(*pair)

        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(run, given))
        for mine, plain in zip(found, wanted, strict=True):
            for gradient, expected in zip(mine, plain, strict=True):
                torch.testing.assert_close(whole(gradient), expected)


def test_modules_that_another_thread_calls_are_not_counted() -> None:
    with ranks(2) as mesh:
        x, model = on(mesh, X, Shard(0)), nn.Softmax(0)
        with CommDebugMode() as counted:
            in_thread(lambda: nn.ReLU()(X))
            model(x)
        assert {*counted.comm_module_counts} == {"Global", "Softmax"}
        assert "ReLU" not in counted.generate_comm_debug_tracing_table()


def test_an_op_goes_on_when_the_observers_of_ops_go() -> None:
    """A thread may be between the look-up of the observed dispatch and its first line."""
    with ranks(2) as mesh:
        x = on(mesh, X, Shard(0))
        with OPS.observing(lambda func, args, kwargs: nullcontext()):
            observed = DTensor.__torch_dispatch__
        negated = observed(torch.ops.aten.neg.default, (DTensor,), (x,), {})
        torch.testing.assert_close(whole(negated), -X)


@pytest.mark.parametrize("first_out", [0, 1])
def test_communication_is_explained_in_the_thread_that_asks(first_out: int) -> None:
    """In whichever order two threads finish, nothing is recorded afterwards, and nothing stays replaced."""
    redistribute, dispatch, ready = DTensor.redistribute, DTensor.__torch_dispatch__, threading.Barrier(2)
    left = threading.Event()

    def run(index: int, x: Any) -> list[str]:
        with explain() as found:
            ready.wait(30)
            whole(x.sum(index))
            if index != first_out:
                assert left.wait(30)
            x.redistribute(placements=[Replicate()])
        if index == first_out:
            left.set()
        return [each.cause for each in found.communications]

    with ranks(2) as mesh, ThreadPoolExecutor(2) as pool:
        x = on(mesh, X, Shard(0))
        running = [pool.submit(run, index, x) for index in range(2)]
        assert [each.result(30) for each in running] == [["full_tensor", "redistribute"]] * 2
    assert not torch.is_anomaly_enabled()
    assert DTensor.redistribute is redistribute
    assert DTensor.__torch_dispatch__ is dispatch


def test_what_another_thread_does_is_no_part_of_an_explanation() -> None:
    with ranks(2) as mesh:
        x, y = on(mesh, X, Shard(0)), on(mesh, Y, Shard(1))
        with explain() as found:
            in_thread(lambda: (x + y, x.redistribute(placements=[Replicate()])))
            x.redistribute(placements=[Replicate()])
        assert [each.cause for each in found.communications] == ["redistribute"]


def test_threads_wait_for_one_collective() -> None:
    waiting, finished = threading.Event(), threading.Event()

    def complete() -> torch.Tensor:
        waiting.set()
        assert finished.wait(30)
        return local

    with ranks(2) as mesh, ThreadPoolExecutor(2) as pool:
        x = on(mesh, X, Shard(0))
        local = x._local_shard
        y = pending(complete, X.device, x._spec)
        try:
            first = pool.submit(lambda: y + 1)
            assert waiting.wait(30)
            second = pool.submit(lambda: y + 1)
            with pytest.raises(TimeoutError):
                second.result(0.2)
        finally:
            finished.set()
        for found in (first, second):
            torch.testing.assert_close(whole(found.result(30)), X + 1)


def test_another_thread_may_get_the_data_of_a_tensor_that_is_about_to_be_read() -> None:
    with ranks(2) as mesh:
        x = on(mesh, X, Shard(0))
        local = x._local_shard
        y: Any = pending(lambda: local, X.device, x._spec)

        def when_the_slot_was_empty(frame: FrameType, event: str, argument: object) -> TraceFunction:
            if event == "exception":
                assert in_thread(lambda: y._local_shard) is local
            return when_the_slot_was_empty

        before = sys.gettrace()
        sys.settrace(when_the_slot_was_empty)
        try:
            found = y._local_shard
        finally:
            sys.settrace(before)
        assert found is local


def test_views_come_while_another_thread_gets_a_local_shard() -> None:
    """At any line of Python, a view may begin that must be recomputed after writes."""

    class View:
        def __init__(self) -> None:
            self.counters: list[Counter] = []
            watch(self)

        def shard(self) -> torch.Tensor:
            return shard

    shard = torch.ones(2)
    views = [View() for _ in range(3)]
    handed, memory = shard.detach(), mark_exposed(shard)

    def at_each_line(frame: FrameType, event: str, argument: object) -> TraceFunction:
        lines.append(frame.f_code.co_name)
        if len(lines) < 50:
            views.append(in_thread(View))
        return at_each_line

    lines: list[str] = []
    before = sys.gettrace()
    sys.settrace(at_each_line)
    try:
        count_writes_through(handed, memory)
    finally:
        sys.settrace(before)
    assert len(lines) > 10
    assert all(len(view.counters) == 1 for view in views[:3])


TraceFunction = Callable[[FrameType, str, Any], Any]
