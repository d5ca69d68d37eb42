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

from .._torch.fake_tensors import has_readable_values
from .._torch.ops import OpOverload, schema_of
from ..comm.on_ranks import from_ranks
from ..random import Draw
from ..random.bits import Key
from ..random.box import Box
from ..random.fill import fill
from ..sharding.layout import Coordinate, Factor, Layout, Run
from ..sharding.mesh import MeshInfo
from ..sharding.recording import is_recording, recorded
from ..sharding.spec import TensorMeta
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
    """Return the attention of a call with these arguments, and its dropout mask: a new one if `mask` is None."""
    query, key, value = given["query"], given["key"], given["value"]
    shared = query.shape[1] // key.shape[1]
    if shared > 1:
        key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    scale = given.get("scale")
    if scale is None:
        scale = 1.0 / math.sqrt(max(query.shape[-1], 1))
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
    """Return the decomposition of a forward op."""

    def run(*args: object, **kwargs: object) -> tuple[object, ...]:
        given = resolve(func).arguments(args, kwargs)
        query = given["query"]
        found, mask = _attention(given, None)
        dropped = (found.weights * found.factors).to(query.dtype)
        results: Kwargs = {"output": dropped @ found.value, **dict.fromkeys(_DROPOUT_MASK, mask)}
        results |= {"max_q": query.shape[2], "max_k": found.key.shape[2]}
        # Backward computes the weights again: it does not use logsumexp.
        unused = query.new_empty(0)
        return tuple(results.get(result.name, unused) for result in schema_of(func).returns)

    return run


def backward_with_dropout(func: OpOverload) -> Callable[..., tuple[Tensor | None, ...]]:
    """Return the decomposition of a backward op."""

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
        if len(schema_of(func).returns) > 3:
            bias: Tensor | None = given.get("attn_bias")
            if bias is not None and given["grad_input_mask"][3]:
                results.append(of_scores.sum_to_size(bias.shape).to(bias.dtype))
            else:
                results.append(None)
        return tuple(results)

    return run


def _summed_over_groups(gradient: Tensor, heads: int) -> Tensor:
    """Return the gradient summed over the query heads that share a key head."""
    if gradient.shape[1] == heads:
        return gradient
    return gradient.unflatten(1, (heads, -1)).sum(2)


# ---- block by block -------------------------------------------------------------------------------------------------


def draw_dropout(mesh_info: MeshInfo, weights: TensorMeta, p: float, device: torch.device) -> Tensor:
    """Return what the dropout mask of these global weights is computed from, the same on all ranks.

    For few weights this is the mask itself; for many the key of random numbers, from which every rank computes the mask
    of the weights that it holds. Either way it is the mask that `native_dropout` of the global weights draws.
    """

    def draw_dropout() -> Tensor:
        return _drawn(mesh_info, weights, p, device)

    return recorded(draw_dropout)


def _drawn(mesh_info: MeshInfo, weights: TensorMeta, p: float, device: torch.device) -> Tensor:
    draw = Draw(mesh_info, weights, device, None)
    replicated = Layout.make(mesh_info.sizes, tuple((Factor(size, ()),) for size in weights.shape))
    key = draw.key
    if key is None:
        return from_ranks(mesh_info, lambda at: draw.numbers(replicated, at, "native_dropout", (p,), torch.bool))
    numbers = torch.stack([torch.as_tensor(number, dtype=torch.int64, device=device) for number in key])
    return from_ranks(mesh_info, lambda at: numbers.clone())


def kept_weights(
    drawn: Tensor, p: float, layout: Layout, at: Coordinate, length: int, queries: Run, keys: Run
) -> Tensor:
    """Return which weights of some queries and keys dropout keeps, for the batch and heads that a rank holds.

    `drawn` is what `draw_dropout` returned, `layout` that of the queries, `length` the number of all keys.
    """
    if drawn.dtype == torch.bool:
        kept = drawn[:, :, slice(*queries), slice(*keys)]
        for dim in (0, 1):
            runs = layout.runs(at)[dim]
            kept = torch.cat([kept.narrow(dim, start, stop - start) for start, stop in runs], dim)
        return kept
    box = _box(layout, at, length, queries, keys)
    sizes = (*layout.local_shape(at)[:2], queries[1] - queries[0], keys[1] - keys[0])
    kept = torch.empty(sizes, dtype=torch.bool, device=drawn.device)
    on_host = drawn.device.type == "cpu" and has_readable_values(drawn) and not is_recording()
    return fill(kept, box, Key(*(drawn.tolist() if on_host else drawn.unbind())), "native_dropout", (p,))


def _box(layout: Layout, at: Coordinate, length: int, queries: Run, keys: Run) -> Box:
    """Return the flat indices of weights among all weights, `[batch, heads, queries, keys]`."""
    offset, stride = queries[0] * length + keys[0], layout.shape[2] * length
    sizes, strides = [queries[1] - queries[0], keys[1] - keys[0]], [length, 1]
    ranges = layout.ranges(at)
    for dim in (1, 0):
        for factor, (start, stop) in reversed(list(zip(layout.dims[dim], ranges[dim], strict=True))):
            offset += start * stride
            sizes.insert(0, stop - start)
            strides.insert(0, stride)
            stride *= factor.size
    return Box(offset, tuple(sizes), tuple(strides))
