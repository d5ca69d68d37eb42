"""Dispatch modes: counted, popped for one call, and put aside."""

from __future__ import annotations

from typing import Any

import torch

from shardwise._torch.modes import (
    OwnMode,
    TorchDispatchMode,
    count_modes,
    expects_pytorch_ops,
    pop_mode,
    without_modes,
)


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


def test_modes_are_counted_and_see_ops() -> None:
    before = count_modes()
    with Seen() as seen:
        assert count_modes() == before + 1
        torch.ones(2).add(1)
    assert count_modes() == before
    assert torch.ops.aten.add.Tensor in seen.ops


def test_a_mode_can_be_popped_for_a_while() -> None:
    with Seen() as seen:
        with pop_mode() as popped:
            assert popped is seen
            torch.ones(2).mul(2)
        torch.ones(2).sub(1)
    assert torch.ops.aten.mul.Tensor not in seen.ops
    assert torch.ops.aten.sub.Tensor in seen.ops


def test_all_modes_can_be_put_aside() -> None:
    with Seen() as seen, without_modes():
        assert count_modes() == 0
        torch.ones(2).mul(2)
    assert seen.ops == []


def test_modes_of_others_are_told_from_our_own() -> None:
    class Own(OwnMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    assert not expects_pytorch_ops()
    with Own():
        assert not expects_pytorch_ops()
        with Seen():
            assert expects_pytorch_ops()
