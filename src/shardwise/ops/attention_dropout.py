"""Attention with dropout, instead of kernels that would draw on every rank for itself: matrix products and a mask.

The mask is drawn as any random tensor is, so that it is the same whatever is cut. It is handed to backward in the place
where the kernels hand over the state of their generator.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .attention import KERNELS
from .call import Call
from .op import Source
from .tables import INSTEAD, READS_SCALARS

_MASK = ("rng_state", "philox_seed")
"""What the result that holds the mask is called; backward calls it philox_seed."""


class _Attention(NamedTuple):
    """Weights before dropout, what dropout multiplies them by, and keys and values with a head for each of queries."""

    weights: Tensor
    factors: Tensor
    key: Tensor
    value: Tensor
    scale: float


def _attention(given: dict[str, Any], mask: Tensor | None) -> tuple[_Attention, Tensor]:
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


def _forward(func: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        given = _named(func, args, kwargs)
        query = given["query"]
        found, mask = _attention(given, None)
        dropped = (found.weights * found.factors).to(query.dtype)
        # Backward works the weights out again: it has no use for their logarithms' sums.
        results: dict[str, Any] = {"output": dropped @ found.value, **dict.fromkeys(_MASK, mask)}
        results |= {"max_q": query.shape[2], "max_k": found.key.shape[2]}
        unused = query.new_empty(0)
        return tuple(results.get(result.name, unused) for result in func._schema.returns)

    return run


def _backward(func: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        given = _named(func, args, kwargs)
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
        results += [_summed(gradient, key.shape[1]) for gradient in (of_key, of_value)]
        if len(func._schema.returns) > 3:
            bias: Tensor | None = given.get("attn_bias")
            if bias is not None and given["grad_input_mask"][3]:
                results.append(of_scores.sum_to_size(bias.shape).to(bias.dtype))
            else:
                results.append(None)
        return tuple(results)

    return run


def _summed(gradient: Tensor, heads: int) -> Tensor:
    """Summed over the heads that share one of keys."""
    if gradient.shape[1] == heads:
        return gradient
    return gradient.unflatten(1, (heads, -1)).sum(2)


def _named(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    arguments = func._schema.arguments
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    return {**defaults, **dict(zip((a.name for a in arguments), args, strict=False)), **kwargs}


def without_dropout(rule: Callable[[Call], str]) -> Source:
    """The rule of calls that drop nothing; others are expressed by other ops."""
    return lambda call: None if call.arg("dropout_p", 0.0) > 0 else rule(call)


for _name, *_ in KERNELS:
    _packet = getattr(torch.ops.aten, _name.removeprefix("aten::"))
    if any(result.name in _MASK for result in _packet.default._schema.returns):
        _back = getattr(torch.ops.aten, f"{_name.removeprefix('aten::')}_backward")
        READS_SCALARS.update((_name, f"{_name}_backward"))
        INSTEAD[f"{_name}.default"] = _forward(_packet.default)
        INSTEAD[f"{_name}_backward.default"] = _backward(_back.default)
