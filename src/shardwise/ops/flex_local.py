"""`flex_attention` on one rank's tensors: the user's functions with global indices, and plain matrix products.

PyTorch's fused kernels for it exist only in compiled code on GPUs. Without them, and for gradients on a CPU, scores are
computed as matrix products, only for the keys that the rank's queries may see.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .flex_blocks import Blocks

Modification: TypeAlias = Callable[..., Tensor]


class Places(NamedTuple):
    """The global index of each local element, by dim, and the head of keys that each head of queries uses."""

    batch: Tensor
    heads: Tensor
    queries: Tensor
    keys: Tensor
    heads_of_keys: Tensor | None = None
    """For each local head of queries, the index of its local head of keys; None if heads are not shared."""


class FlexResult(NamedTuple):
    """What attention returns: the output, the logsumexp of scores and the largest score, by query."""

    output: Tensor
    logsumexp: Tensor
    max_scores: Tensor


def attend_locally(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    places: Places,
    score_mod: Modification | None,
    mask_mod: Modification | None,
    blocks: Blocks | None,
    scale: float,
    held: Sequence[Tensor] = (),
) -> FlexResult:
    """Return attention of `[batch, heads, positions, features]`; queries that see nothing get zeros.

    `blocks` are those of the mask of the global program, `held` the tensors that the functions capture.
    """
    if blocks is not None:
        blocks = blocks.of(places.batch, places.heads)
        seen = blocks.columns_seen(places.queries, places.keys) if query.device.type == "cpu" else None
        if seen is not None:
            key, value = key.index_select(2, seen), value.index_select(2, seen)
            places = places._replace(keys=places.keys[seen])
    if places.heads_of_keys is not None:
        key, value = key.index_select(1, places.heads_of_keys), value.index_select(1, places.heads_of_keys)
    precise = torch.float64 if query.dtype == torch.float64 else torch.float32
    scores = (query @ key.transpose(-1, -2)).to(precise) * scale
    indices = places.batch, places.heads, places.queries, places.keys
    if not scores.numel():
        # The functions are not called, but the tensors that they capture need a gradient: all ranks reduce it.
        for tensor in held:
            scores = scores + tensor.sum() * 0 if tensor.requires_grad else scores
        return _attended(scores, value, query.dtype)
    if score_mod is not None:
        scores = _at_each(score_mod, indices, scores).to(precise)
    if blocks is not None and mask_mod is not None:
        counts = blocks.allowed(places.queries, places.keys, lambda: _at_each(mask_mod, indices))
        scores = scores.masked_fill(~counts, -math.inf)
    return _attended(scores, value, query.dtype)


def _attended(scores: Tensor, value: Tensor, dtype: torch.dtype) -> FlexResult:
    """Return the softmax of scores times the values. Its gradient is finite even for queries that see no key."""
    if not scores.shape[-1]:
        lowest = scores.new_full(scores.shape[:-1], -math.inf)
        return FlexResult((scores @ value.to(scores.dtype)).to(dtype), lowest, lowest)
    largest = scores.detach().amax(-1)
    shift = largest.masked_fill(largest == -math.inf, 0.0)
    weights = (scores - shift.unsqueeze(-1)).exp()
    total = weights.sum(-1)
    empty = total == 0
    filled = total.masked_fill(empty, 1.0)
    output = (weights / filled.unsqueeze(-1)) @ value.to(scores.dtype)
    return FlexResult(output.to(dtype), (shift + filled.log()).masked_fill(empty, -math.inf), largest)


# ---- the user's functions -------------------------------------------------------------------------------------------


def _at_each(function: Callable[..., Tensor], indices: Sequence[Tensor], *scores: Tensor) -> Tensor:
    """Call a function of single indices (and a score) for all of them: `[batch, heads, queries, keys]`."""
    mapped = function
    for dim in (3, 2, 1, 0):
        own = tuple(0 if at == dim else None for at in range(4))
        mapped = torch.vmap(mapped, in_dims=(0,) * len(scores) + own)
    with _IndexedByTensors():
        result: Tensor = mapped(*scores, *indices)
    return result


class _IndexedByTensors(TorchFunctionMode):
    """Lets functions under vmap index tables by tensors without dims: `table[q]` becomes `aten.index`."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func is Tensor.__getitem__:
            table, index = args
            given = index if isinstance(index, tuple) else (index,)
            if any(isinstance(one, Tensor) for one in given) and all(isinstance(one, (int, Tensor)) for one in given):
                tensors = [one if isinstance(one, Tensor) else torch.tensor(one, device=table.device) for one in given]
                return torch.ops.aten.index.Tensor(table, tensors)
        return func(*args, **(kwargs or {}))
