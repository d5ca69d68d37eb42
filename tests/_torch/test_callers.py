"""Which functions stand between the caller of an op and the class of its tensors."""

import sys

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise._torch.callers import passes_ops_on


def test_a_mode_and_its_wrappers_pass_ops_on() -> None:
    found = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            frame = sys._getframe()
            while frame.f_code is not calling.__code__:
                found.append(frame.f_code)
                frame = frame.f_back
            return func(*args, **kwargs or {})

    def calling() -> None:
        x + x
        torch.ops.aten.neg.default(x)

    x = torch.ones(2)
    with Mode():
        calling()
    assert len(found) > 2
    assert all(map(passes_ops_on, found)), found
    assert not passes_ops_on(calling.__code__)
