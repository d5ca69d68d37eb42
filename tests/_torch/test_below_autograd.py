"""Ops inside the context are not recorded by autograd."""

from __future__ import annotations

import torch

from shardwise._torch.below_autograd import below_autograd


def test_no_node_is_recorded() -> None:
    x = torch.ones(2, requires_grad=True)
    with below_autograd():
        assert torch.is_grad_enabled()
        assert (x.detach() * 2).grad_fn is None
        y = x * 2
    assert y.grad_fn is None
    assert (x * 2).grad_fn is not None
