"""What `_torch.autograd` relies on."""

from __future__ import annotations

from typing import Any

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
