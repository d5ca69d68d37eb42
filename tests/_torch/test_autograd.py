"""What `_torch.autograd` relies on."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from shardwise._torch.autograd import call_after_backward, in_backward


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
