"""What `_torch.autograd` relies on."""

from __future__ import annotations

import sys
import weakref
from typing import Any, ClassVar

import pytest
import torch

from shardwise._torch.autograd import QuickFunction, call_after_backward, in_backward


def test_in_backward_is_true_inside_a_backward_formula_only() -> None:
    seen = []

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            seen.append(in_backward())
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            seen.append(in_backward())
            return gradient

    Seen.apply(torch.ones(2, requires_grad=True)).sum().backward()
    assert [*seen, in_backward()] == [False, True, False]


def test_a_function_is_called_at_the_end_of_the_backward_pass() -> None:
    seen = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: call_after_backward(lambda: seen.append(x.grad)))
    y.sum().backward()
    assert len(seen) == 1
    assert seen[0] is x.grad


def test_a_pass_that_fails_forgets_the_function() -> None:
    """After all gradients, in the pass; a pass that fails forgets it."""

    class Notes(list[Any]):
        def add(self) -> None:
            self.append((leaf.grad, torch.is_grad_enabled()))

    def hook(grad: torch.Tensor) -> None:
        call_after_backward(current[0].add)

    leaf = torch.ones(2, requires_grad=True)
    leaf.register_hook(hook)
    current = [Notes()]
    leaf.sum().backward()
    assert [(grad.tolist(), enabled) for grad, enabled in current[0]] == [([1.0, 1.0], False)]

    def fail(leaf: torch.Tensor) -> None:
        raise ArithmeticError

    leaf.register_post_accumulate_grad_hook(fail)
    current = [Notes()]
    alive = weakref.ref(current[0])
    with pytest.raises(ArithmeticError):
        leaf.sum().backward()
    assert not current.pop()
    assert alive() is None


class Cube(QuickFunction):
    callers: ClassVar[list[str]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return factor * x**3

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        Cube.callers.append(sys._getframe(1).f_code.co_name)
        (x,) = ctx.saved_tensors
        return gradient * ctx.factor * 3 * x**2, None


def test_the_engine_calls_the_derivative_of_a_quick_function_without_a_frame_between() -> None:
    Cube.callers.clear()
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    (first,) = torch.autograd.grad(Cube.apply(x, 2.0).sum(), x, create_graph=True)
    assert first.tolist() == [6.0, 24.0]
    (second,) = torch.autograd.grad(first.sum(), x)
    assert second.tolist() == [12.0, 24.0]
    assert Cube.callers == ["_engine_run_backward"], "the class of its nodes has another method for this"


def test_a_node_of_a_quick_function_can_be_applied_by_hand() -> None:
    y = Cube.apply(torch.tensor([2.0], requires_grad=True), 1.0)
    gradient, none = y.grad_fn.apply(torch.ones(1))
    assert gradient.tolist() == [12.0]
    assert none is None


def test_a_derivative_that_is_swapped_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """By nodes that were made before, too. Tools swap derivatives for wrappers."""
    x = torch.full((2,), 2.0, requires_grad=True)
    y = Cube.apply(x, 1.0).sum()
    original, called = Cube.backward, []

    def wrapper(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        called.append(ctx)
        return original(ctx, gradient)

    with monkeypatch.context() as patch:
        patch.setattr(Cube, "backward", staticmethod(wrapper))
        (gradient,) = torch.autograd.grad(y, x, retain_graph=True)
    assert gradient.tolist() == [12.0, 12.0]
    assert len(called) == 1
    torch.autograd.grad(y, x)
    assert len(called) == 1
