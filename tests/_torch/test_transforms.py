"""What may treat an op in its own way before tensors see it."""

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from shardwise._torch.transforms import anything_transforms


def test_nothing_transforms() -> None:
    assert not anything_transforms()


def test_autocast_does() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert anything_transforms()
    assert not anything_transforms()


def test_forward_derivatives_do() -> None:
    with forward_ad.dual_level():
        assert anything_transforms()
    assert not anything_transforms()


def test_function_transforms_do() -> None:
    seen: list[bool] = []

    def fn(x: Tensor) -> Tensor:
        seen.append(anything_transforms())
        return x * 2

    torch.func.vmap(fn)(torch.ones(2))
    assert seen == [True]
    assert not anything_transforms()
