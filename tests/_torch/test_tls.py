"""PyTorch's thread-local table of Python objects."""

import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import torch

from shardwise._torch.tls import ThreadValue


def test_a_value_belongs_to_its_thread() -> None:
    value = ThreadValue("test", 0)
    assert value.get() == 0
    value.set(1)
    try:
        assert value.get() == 1
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(value.get).result() == 0
            pool.submit(value.set, 2).result()
            assert pool.submit(value.get).result() == 2
        assert value.get() == 1
    finally:
        value.set(0)


def test_a_backward_pass_sees_the_value_of_the_thread_that_starts_it() -> None:
    value = ThreadValue("test", 0)
    seen: list[int] = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda gradient: seen.append(value.get()))
    y = (x * 2).sum()
    value.set(1)
    try:
        y.backward(retain_graph=True)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(y.backward).result()
    finally:
        value.set(0)
    assert seen == [1, 0]


def test_a_value_is_held_while_it_is_set_and_freed_after() -> None:
    """PyTorch 2.11 does not count the references of its table."""

    class Held:
        pass

    value: ThreadValue[object] = ThreadValue("test", None)
    alive = []
    for _ in range(3):
        made = Held()
        alive.append(weakref.ref(made))
        before = sys.getrefcount(made)
        value.set(made)
        assert sys.getrefcount(made) == before + 1
        assert value.get() is made
        del made
        assert value.get() is alive[-1]()
        x = torch.ones(2, requires_grad=True)
        (x * 2).sum().backward()
    value.set(None)
    assert [reference() for reference in alive] == [None, None, None]
