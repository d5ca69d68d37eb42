"""What may treat an op in its own way before tensors see it."""

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from shardwise._torch.transforms import (
    anything_transforms,
    innermost,
    is_wrapped,
    outside_transforms,
    transforms_active,
)


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


def test_wrappers_of_transforms_are_looked_through() -> None:
    x = torch.ones(2)
    seen = []

    def look(y: torch.Tensor) -> torch.Tensor:
        seen.append((is_wrapped(y), innermost(y) is x, is_wrapped(x)))
        with outside_transforms():
            seen.append((transforms_active(), is_wrapped(x + 1)))
        return (y * y).sum()

    torch.func.grad(torch.func.grad(look))(x.sum())
    seen.clear()
    torch.func.grad(look)(x)
    assert seen == [(True, True, False), (False, False)]
    assert innermost(x) is x
