"""PyTorch's thread-local table of Python objects."""

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
