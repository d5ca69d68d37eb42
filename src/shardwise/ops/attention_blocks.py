"""Attention of some queries to some keys (a block), and how blocks are merged into attention to all keys.

A block returns its output and the logarithm of the sum of its weights (`logsumexp`), by which the outputs of several
blocks are weighted. In backward, a block needs the output and logsumexp of all blocks together.

Blocks run by PyTorch's fused kernels, or, with masks and dropout, as matrix products. Key heads that several query
heads share are not repeated.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .attention_gpu import attend_on_gpu, gradients_on_gpu

_aten = torch.ops.aten
_FUSED_ON_CPU = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_FUSED_ON_CUDA = (torch.bfloat16, torch.float16)


class Options(NamedTuple):
    """How a block is computed. `mask` is added to the scores or, if bool, is True where they count; `kept` is True for
    weights that dropout keeps, and `dropout_p` is its probability."""

    scale: float
    causal: bool = False
    mask: Tensor | None = None
    kept: Tensor | None = None
    dropout_p: float = 0.0


def attend(query: Tensor, key: Tensor, value: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Return the output of a block, and its logsumexp."""
    if _is_fused(query, key, value, options):
        if query.device.type == "cpu":
            found = _aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, 0.0, options.causal, scale=options.scale
            )
            return found[0], found[1]
        return attend_on_gpu(query, key, value, options.causal, options.scale)
    scores = _scores(query, key, options)
    logsumexp = scores.logsumexp(-1)
    weights = _weights(scores, logsumexp)
    if options.kept is not None:
        weights *= _dropout_factors(options, weights.dtype)
    return _split_rows(_joined_rows(weights, value) @ value.to(weights.dtype), query), logsumexp


class Saved(NamedTuple):
    """What the backward pass needs of some queries: the gradient of their output, the output, and its logsumexp."""

    gradient: Tensor
    output: Tensor
    logsumexp: Tensor


def gradients(
    saved: Saved, query: Tensor, key: Tensor, value: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what a block adds to the gradients of its query, key and value."""
    if _is_fused(query, key, value, options):
        return _fused_gradients(saved, query, key, value, options)
    weights = _weights(_scores(query, key, options), saved.logsumexp)
    gradient, wide_value = saved.gradient.to(weights.dtype), value.to(weights.dtype)
    joined = _joined_rows(gradient, value)
    dropped, of_weights = weights, (joined @ wide_value.transpose(-2, -1)).view(weights.shape)
    if options.kept is not None:
        factors = _dropout_factors(options, weights.dtype)
        dropped, of_weights = weights * factors, of_weights * factors
    of_value = _joined_rows(dropped, value).transpose(-2, -1) @ joined
    carried = (gradient * saved.output).sum(-1, keepdim=True)
    of_scores = _joined_rows(weights * (of_weights - carried), value).mul_(options.scale)
    of_query = _split_rows(of_scores @ key.to(weights.dtype), query)
    of_key = of_scores.transpose(-2, -1) @ _joined_rows(query, key).to(weights.dtype)
    return of_query, of_key, of_value


class Merged:
    """Merges the outputs of blocks: each is weighted by its share of the sum of all weights."""

    def __init__(self, output: Tensor, logsumexp: Tensor) -> None:
        """Start with tensors for the output and logsumexp of all queries, which are overwritten.

        The output of queries that no block has is zero.
        """
        wide = torch.promote_types(output.dtype, torch.float32)
        self._result = output
        self.output = output.zero_() if output.dtype == wide else torch.zeros_like(output, dtype=wide)
        self.logsumexp = logsumexp.fill_(-math.inf)

    def add(self, rows: slice, output: Tensor, logsumexp: Tensor) -> None:
        """Add a block of these queries. Its `output` may be overwritten."""
        total, before = self.output[:, :, rows], self.logsumexp[:, :, rows]
        after = torch.logaddexp(before, logsumexp)
        # Where all weights are zero so far, any finite number serves.
        reference = after.masked_fill(after == -math.inf, 0.0)
        total.mul_((before - reference).exp_().unsqueeze(-1))
        total.add_(output.to(total.dtype).mul_((logsumexp - reference).exp_().unsqueeze(-1)))
        before.copy_(after)

    def results(self) -> tuple[Tensor, Tensor]:
        """Return the output and the logsumexp of all queries."""
        if self.output is not self._result:
            self._result.copy_(self.output)
        return self._result, self.logsumexp


# ---- fused ----------------------------------------------------------------------------------------------------------


def _is_fused(query: Tensor, key: Tensor, value: Tensor, options: Options) -> bool:
    if options.mask is not None or options.kept is not None or query.shape[-1] != value.shape[-1]:
        return False
    if any(tensor.stride(-1) != 1 for tensor in (query, key, value)):
        return False
    if query.device.type == "cpu":
        return query.dtype in _FUSED_ON_CPU
    return query.device.type == "cuda" and query.dtype in _FUSED_ON_CUDA and query.shape[-1] % 8 == 0


def _fused_gradients(
    saved: Saved, query: Tensor, key: Tensor, value: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    gradient = saved.gradient if saved.gradient.stride(-1) == 1 else saved.gradient.contiguous()
    given = gradient, query, key, value, saved.output, saved.logsumexp
    if query.device.type == "cpu":
        found = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *given, 0.0, options.causal, scale=options.scale
        )
        return found[0], found[1], found[2]
    return gradients_on_gpu(*given, options.causal, options.scale)


# ---- by products ----------------------------------------------------------------------------------------------------


def _scores(query: Tensor, key: Tensor, options: Options) -> Tensor:
    wide = torch.promote_types(query.dtype, torch.float32)
    joined = _joined_rows(query, key).to(wide) @ key.to(wide).transpose(-2, -1)
    scores = joined.view(*query.shape[:-1], key.shape[2]).mul_(options.scale)
    if options.causal:
        later = scores.new_ones(scores.shape[-2:], dtype=torch.bool).triu_(1)
        scores.masked_fill_(later, -math.inf)
    if options.mask is not None:
        mask = options.mask
        scores = scores.masked_fill_(~mask, -math.inf) if mask.dtype == torch.bool else scores.add_(mask)
    return scores


def _weights(scores: Tensor, logsumexp: Tensor) -> Tensor:
    """Return the weights of keys, which replace `scores` in its memory; zeros for queries that see no key."""
    reference = logsumexp.masked_fill(logsumexp == -math.inf, 0.0).unsqueeze(-1)
    return scores.sub_(reference).exp_()


def _dropout_factors(options: Options, dtype: torch.dtype) -> Tensor:
    assert options.kept is not None
    return options.kept.to(dtype).mul_(1.0 / (1.0 - options.dropout_p) if options.dropout_p < 1 else 0.0)


def _joined_rows(tensor: Tensor, key: Tensor) -> Tensor:
    """Return the rows of the query heads that share a key head, one after the other.

    `[b, heads of keys, rows, ...]`.
    """
    return tensor.reshape(tensor.shape[0], key.shape[1], -1, tensor.shape[-1])


def _split_rows(tensor: Tensor, query: Tensor) -> Tensor:
    """Undo `_joined_rows`: return the heads and rows of the queries."""
    return tensor.view(*query.shape[:-1], tensor.shape[-1])
