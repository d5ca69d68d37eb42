"""Attention with dropout, decomposed into matrix products and a mask: the fused ops would draw on each rank separately.

The mask is drawn as any random tensor is, so it does not depend on the placements. It is passed to backward in place of
the state of the generator that the fused ops pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .._torch.ops import OpOverload
from .call import Kwargs
from .registry import resolve

_DROPOUT_MASK = ("rng_state", "philox_seed")
"""The names of the result that holds the mask; the argument of backward is called philox_seed."""


class _Attention(NamedTuple):
    """The weights before dropout, the factors that dropout multiplies them by, and a key and value for each head."""

    weights: Tensor
    factors: Tensor
    key: Tensor
    value: Tensor
    scale: float


def _attention(given: Kwargs, mask: Tensor | None) -> tuple[_Attention, Tensor]:
    """The attention of a call with these arguments, and the dropout mask; None to draw a new mask."""
    query, key, value = given["query"], given["key"], given["value"]
    shared = query.shape[1] // key.shape[1]
    if shared > 1:
        key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    scale = given.get("scale") or 1.0 / math.sqrt(query.shape[-1])
    scores = (query @ key.transpose(-2, -1)).float() * scale
    if given.get("attn_bias") is not None:
        scores = scores + given["attn_bias"]
    if given.get("is_causal"):
        past = scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~past, -math.inf)
    if mask is None:
        mask = torch.empty_like(scores).bernoulli_(1.0 - given["dropout_p"]).bool()
    factors = mask / (1.0 - given["dropout_p"]) if given["dropout_p"] < 1 else torch.zeros_like(scores)
    return _Attention(scores.softmax(-1), factors, key, value, scale), mask


def forward_with_dropout(func: OpOverload) -> Callable[..., tuple[object, ...]]:
    """The decomposition of a forward op."""

    def run(*args: object, **kwargs: object) -> tuple[object, ...]:
        given = resolve(func).arguments(args, kwargs)
        query = given["query"]
        found, mask = _attention(given, None)
        dropped = (found.weights * found.factors).to(query.dtype)
        results: Kwargs = {"output": dropped @ found.value, **dict.fromkeys(_DROPOUT_MASK, mask)}
        results |= {"max_q": query.shape[2], "max_k": found.key.shape[2]}
        # Backward computes the weights again: it does not use logsumexp.
        unused = query.new_empty(0)
        return tuple(results.get(result.name, unused) for result in func._schema.returns)

    return run


def backward_with_dropout(func: OpOverload) -> Callable[..., tuple[Tensor | None, ...]]:
    """The decomposition of a backward op."""

    def run(*args: object, **kwargs: object) -> tuple[Tensor | None, ...]:
        given = resolve(func).arguments(args, kwargs)
        query, key = given["query"], given["key"]
        gradient: Tensor = given["grad_out" if "grad_out" in given else "grad_out_"]
        found, _ = _attention(given, given["philox_seed"])
        of_value = (found.weights * found.factors).to(query.dtype).transpose(-2, -1) @ gradient
        of_weights = (gradient @ found.value.transpose(-2, -1)).float() * found.factors
        carried = found.weights * of_weights
        of_scores = carried - found.weights * carried.sum(-1, keepdim=True)
        scaled = (of_scores * found.scale).to(query.dtype)
        of_key = scaled.transpose(-2, -1) @ query
        results: list[Tensor | None] = [scaled @ found.key]
        results += [_summed_over_groups(gradient, key.shape[1]) for gradient in (of_key, of_value)]
        if len(func._schema.returns) > 3:
            bias: Tensor | None = given.get("attn_bias")
            if bias is not None and given["grad_input_mask"][3]:
                results.append(of_scores.sum_to_size(bias.shape).to(bias.dtype))
            else:
                results.append(None)
        return tuple(results)

    return run


def _summed_over_groups(gradient: Tensor, heads: int) -> Tensor:
    """The gradient summed over the query heads that share a key head."""
    if gradient.shape[1] == heads:
        return gradient
    return gradient.unflatten(1, (heads, -1)).sum(2)
