"""The total norm by which `clip_grad_norm_` clips gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

__all__ = ["watching_clipping"]


@contextmanager
def watching_clipping(seen: Callable[[Tensor], None]) -> Iterator[None]:
    """Call `seen` with the total norm whenever gradients are about to be clipped by it, inside the block.

    `clip_grad_norm_` and the public `clip_grads_with_norm_` both end in `clip_grad._clip_grads_with_norm_`; the first
    looks it up in its module, the second is that function under a public name.
    """
    original = clip_grad._clip_grads_with_norm_

    def clipping(
        parameters: Tensor | Iterable[Tensor], max_norm: float, total_norm: Tensor, *args: Any, **kwargs: Any
    ) -> None:
        seen(total_norm)
        original(parameters, max_norm, total_norm, *args, **kwargs)

    clip_grad._clip_grads_with_norm_ = clipping
    torch.nn.utils.clip_grads_with_norm_ = clipping
    try:
        yield
    finally:
        clip_grad._clip_grads_with_norm_ = original
        torch.nn.utils.clip_grads_with_norm_ = original
