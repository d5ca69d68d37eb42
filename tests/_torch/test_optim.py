"""The lists of classes that optimizers' fast paths and the clipping of gradients consult."""

from __future__ import annotations

import torch
from torch.optim.optimizer import _foreach_supported_types as optimized
from torch.utils._foreach_utils import _foreach_supported_types as clipped
from torch.utils._foreach_utils import _has_foreach_support

from shardwise import DTensor
from shardwise._torch.optim import accept_class, has_step_hooks


def test_a_class_that_was_accepted_takes_the_fast_path() -> None:
    class Wrapper(torch.Tensor):
        pass

    tensor = torch.ones(2).as_subclass(Wrapper)
    assert not _has_foreach_support([tensor], torch.device("cuda"))
    accept_class(Wrapper)
    accept_class(Wrapper)  # once is enough
    assert _has_foreach_support([tensor], torch.device("cuda"))


def test_distributed_tensors_were_accepted() -> None:
    assert optimized.count(DTensor) == 1
    assert clipped.count(DTensor) == 1


def test_hooks_of_an_optimizer_are_seen() -> None:
    optimizer = torch.optim.SGD([torch.ones(2, requires_grad=True)])
    assert not has_step_hooks(optimizer)
    for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
        handle = register(lambda *args: None)
        assert has_step_hooks(optimizer)
        handle.remove()
        assert not has_step_hooks(optimizer)
