"""Programs that are silently wrong, refused or hanging in torch.distributed.tensor 2.13, as functions of plain tensors.

Every entry is (function, tensors). The tensors are distributed in every way, and the result, the gradients and the
tensors that were written to must be those of one device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Program = tuple[Callable[..., object], tuple[Tensor, ...]]


def _numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _indices(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(sum(shape)))


def _ignored(target: Tensor) -> Tensor:
    return torch.where(torch.arange(len(target)) % 3 == 1, -100, target)


def weighted_nll(logits: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    return F.nll_loss(logits.log_softmax(-1), target, weight.detach())


def cross_entropy_with_ignored_targets(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target, ignore_index=-100)


def cross_entropy_with_smoothing(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target, label_smoothing=0.1)


def gather_with_a_shorter_index(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(1, index)


def item_of_a_sum(x: Tensor) -> float:
    return x.sum().item()


def zero_a_slice(x: Tensor) -> Tensor:
    x[:2].zero_()
    return x


def assign_a_slice(x: Tensor) -> Tensor:
    x[2:5] = 7.0
    return x


def convolve_images(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv2d(x, weight, padding=1, stride=2)


def embed_twice(weight: Tensor, tokens: Tensor) -> Tensor:
    return F.embedding(tokens, weight) * 2 + F.embedding(tokens.flip(0), weight)


def reshape_rows(x: Tensor) -> Tensor:
    return x.reshape(-1, 2).sin()


def clamp_in_place(x: Tensor) -> Tensor:
    return x.clamp_(min=0.25)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def linear_on_sequences(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, weight, bias)


PAINS: dict[str, Program] = {
    "weighted nll": (weighted_nll, (_numbers(7, 5), _indices(5, 7), _numbers(5).abs())),
    "ignored targets": (cross_entropy_with_ignored_targets, (_numbers(7, 5), _ignored(_indices(5, 7)))),
    "label smoothing": (cross_entropy_with_smoothing, (_numbers(7, 5), _indices(5, 7))),
    "short index": (gather_with_a_shorter_index, (_numbers(7, 5), _indices(5, 4, 3))),
    "item": (item_of_a_sum, (_numbers(7, 5),)),
    "zero a slice": (zero_a_slice, (_numbers(7, 5),)),
    "assign a slice": (assign_a_slice, (_numbers(7, 5),)),
    "convolution": (convolve_images, (_numbers(2, 3, 7, 6), _numbers(4, 3, 3, 3))),
    "embedding": (embed_twice, (_numbers(10, 4), _indices(10, 3, 5))),
    "reshape": (reshape_rows, (_numbers(5, 4),)),
    "clamp": (clamp_in_place, (_numbers(7, 5),)),
    "attention": (attend, (_numbers(2, 3, 5, 4), _numbers(2, 3, 5, 4).flip(0), _numbers(2, 3, 5, 4).sin())),
    "linear": (linear_on_sequences, (_numbers(2, 5, 4), _numbers(6, 4), _numbers(6))),
}
