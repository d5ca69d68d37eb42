"""Hooks on nodes of autograd, and those that programs register after ours."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks

from shardwise._torch.node_hooks import HookRegistration, UnpackHookWrapping

CALLS: list[str] = []


def begin(gradients: tuple[Tensor | None, ...]) -> None:
    CALLS.append("begin")


def end(grad_inputs: object, grad_outputs: object) -> None:
    CALLS.append("end")


def wrapped(hook):
    def run(*args: object) -> object:
        CALLS.append("wrapped")
        return hook(*args)

    return run


def users(*args: object) -> None:
    CALLS.append("user's")


@pytest.fixture(autouse=True)
def registration() -> Iterator[HookRegistration]:
    CALLS.clear()
    registration = HookRegistration({begin}, {end}, wrapped, lambda: False)
    registration.install()
    yield registration
    registration.uninstall()


def marked() -> Tensor:
    y = torch.ones(2, requires_grad=True) * 2
    assert y.grad_fn is not None
    y.grad_fn.register_prehook(begin)
    y.grad_fn.register_hook(end)
    return y


def test_prehooks_after_ours_are_wrapped_and_can_be_removed() -> None:
    y = marked()
    assert y.grad_fn is not None
    handle = y.grad_fn.register_prehook(users)
    y.sum().backward(retain_graph=True)
    assert CALLS == ["begin", "wrapped", "user's", "end"]
    CALLS.clear()
    handle.remove()
    y.sum().backward()
    assert CALLS == ["begin", "end"]


def test_other_hooks_are_not_wrapped() -> None:
    y = marked()
    assert y.grad_fn is not None
    y.grad_fn.register_hook(users)
    other = y * 2
    assert other.grad_fn is not None
    other.grad_fn.register_prehook(users)
    other.grad_fn.register_hook(users)
    other.sum().backward()
    assert CALLS == ["user's", "user's", "begin", "end", "user's"]


def test_after_uninstalling_hooks_are_pytorchs(registration: HookRegistration) -> None:
    registration.uninstall()
    y = marked()
    assert y.grad_fn is not None
    y.grad_fn.register_prehook(users)
    y.sum().backward()
    assert CALLS == ["begin", "user's", "end"]


def unpack(saved: Tensor) -> Tensor:
    CALLS.append("user's")
    return saved


def square_of_saved(unpack_hook) -> None:
    x = torch.ones(2, requires_grad=True)
    with saved_tensors_hooks(lambda tensor: tensor, unpack_hook):
        y = x**2
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2]


def test_unpack_hooks_are_wrapped_while_installed() -> None:
    wrapping = UnpackHookWrapping(wrapped)
    wrapping.install()
    try:
        square_of_saved(unpack)
        assert CALLS == ["wrapped", "user's"]
        CALLS.clear()
        square_of_saved(fx.symbolic_trace(lambda saved: saved))
        assert not CALLS
    finally:
        wrapping.uninstall()
    square_of_saved(unpack)
    assert CALLS == ["user's"]


def test_unpack_hooks_of_one_saved_tensor_are_wrapped() -> None:
    wrapping = UnpackHookWrapping(wrapped)
    wrapping.install()
    try:
        x = torch.ones(2, requires_grad=True)
        y = x**2
        y.grad_fn._raw_saved_self.register_hooks(lambda tensor: tensor, unpack)
        y.sum().backward()
    finally:
        wrapping.uninstall()
    assert CALLS == ["wrapped", "user's"]


def test_blocks_of_classes_of_their_own_are_wrapped() -> None:
    wrapping = UnpackHookWrapping(wrapped)
    wrapping.install()
    try:
        x = torch.ones(2, requires_grad=True)
        with torch.autograd.graph.save_on_cpu():
            y = x**2
        y.sum().backward()
    finally:
        wrapping.uninstall()
    assert CALLS == ["wrapped"]
