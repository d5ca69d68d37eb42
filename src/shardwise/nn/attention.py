"""Attention over sequences that are sharded by position: packed documents, and head-tail order.

`F.scaled_dot_product_attention` of DTensors that are sharded by position needs nothing from here.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dispatch.modes import implicit_replication
from ..errors import InputError, ShapeError
from ..ops.attention_method import zigzag_ranks
from ..ops.attention_segments import zigzag_order
from ..ops.context_attention import Attention, attend_over_sequence
from ..ops.sequence_options import Method
from ..sharding.placement import Replicate, Shard
from ..tensor.dtensor import DTensor


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Sequence[int] | Tensor,
    *,
    is_causal: bool = True,
    dropout_p: float = 0.0,
    scale: float | None = None,
    method: Method | None = None,
) -> Tensor:
    """Compute attention over a sequence of packed documents: each token attends to tokens of its own document only.

    Tensors are `[tokens, heads, features]` or `[batch, heads, tokens, features]`, with fewer heads of keys than of
    queries for grouped-query attention. `cu_seqlens` are the starts of the documents, and the number of tokens; if it
    is a tensor, it is read on the host. Tokens may be sharded in any way: there is no padding, and ranks skip keys that
    their tokens do not see. Plain tensors are computed document by document.

    >>> q, k, v = (shardwise.randn(2267, 4, 16, device_mesh=mesh, placements=[Shard(0)]) for _ in range(3))
    >>> packed_attention(q, k, v, [0, 137, 2178, 2267]).placements
    (Shard(dim=0),)
    """
    if query.dim() == 3:
        query, key, value = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value))
        output = packed_attention(
            query, key, value, cu_seqlens, is_causal=is_causal, dropout_p=dropout_p, scale=scale, method=method
        )
        return output.squeeze(0).transpose(0, 1)
    _check_shapes(query, key, value)
    edges = _edges(cu_seqlens, query.shape[2])
    if not isinstance(query, DTensor):
        return _by_document(query, key, value, edges, is_causal, dropout_p, scale)
    if not isinstance(key, DTensor) or not isinstance(value, DTensor):
        plain = [name for name, x in (("key", key), ("value", value)) if not isinstance(x, DTensor)]
        raise InputError(
            f"packed_attention got the DTensor {query.spec!r} as query, but plain tensors as {' and '.join(plain)}",
            "distribute all three on one mesh: distribute_tensor(x, mesh, placements)",
        )
    zigzag = zigzag_ranks(query.spec, key.spec, value.spec)
    given = Attention(None, dropout_p, is_causal, scale, edges, zigzag)
    result: Tensor = attend_over_sequence(query, key, value, given, method)
    return result


def _check_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    shapes = f"queries {list(query.shape)}, keys {list(key.shape)} and values {list(value.shape)}"
    if not query.dim() == key.dim() == value.dim() == 4:
        raise ShapeError(f"packed_attention got {shapes}", "pass [tokens, heads, features] each")
    tokens = key.shape[:3] == value.shape[:3] and query.shape[0] == key.shape[0] and query.shape[2:] == key.shape[2:]
    if not tokens or not key.shape[1] or query.shape[1] % key.shape[1]:
        raise ShapeError(
            f"packed_attention got {shapes} ([batch, heads, tokens, features])",
            "pass equally many tokens in all three, and a number of query heads that is a multiple of the key heads",
        )


def _edges(cu_seqlens: Sequence[int] | Tensor, tokens: int) -> tuple[int, ...]:
    """Return the starts of the documents and the number of tokens, without empty documents."""
    if isinstance(cu_seqlens, DTensor):
        cu_seqlens = cu_seqlens.full_tensor()
    given = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else list(cu_seqlens)
    if not given or given[0] != 0 or given[-1] != tokens or any(a > b for a, b in itertools.pairwise(given)):
        raise ShapeError(
            f"packed_attention got cu_seqlens={given} for {tokens} tokens",
            f"pass the start of each document, from 0 on in ascending order, and at the end {tokens}",
        )
    return tuple(dict.fromkeys(given))


def _by_document(
    query: Tensor, key: Tensor, value: Tensor, edges: Sequence[int], is_causal: bool, p: float, scale: float | None
) -> Tensor:
    if len(edges) < 2:
        return query.new_zeros((*query.shape[:3], value.shape[-1]))
    sizes = [stop - start for start, stop in itertools.pairwise(edges)]
    shared = query.shape[1] != key.shape[1]
    outputs = [
        F.scaled_dot_product_attention(q, k, v, None, p, is_causal, scale=scale, enable_gqa=shared)
        for q, k, v in zip(*(tensor.split(sizes, 2) for tensor in (query, key, value)), strict=True)
    ]
    return torch.cat(outputs, 2)


def zigzag(tensor: DTensor, dim: int, axis: str | int) -> DTensor:
    """Return the tensor sharded over a mesh axis along dim `dim`, with its sequence in head-tail order.

    Each rank gets a chunk of the head of the sequence and the chunk of the tail that mirrors it, so that all ranks have
    the same work in causal attention. Apply it to everything that has positions (tokens, labels, position ids), and run
    the model inside `attention_over_sequence(zigzag=True)`. The tensor must not be sharded along `dim`.

    >>> x = zigzag(distribute_tensor(torch.arange(8), mesh, [Replicate()]), 0, "cp")
    >>> x.shards[0], x.shards[1]                    # on a mesh of 2 ranks
    (tensor([0, 1, 6, 7]), tensor([2, 3, 4, 5]))
    """
    dim, index = _place(tensor, dim, axis)
    if any(placement.is_shard(dim) for placement in tensor.placements):
        raise InputError(
            f"zigzag cannot reorder dim {dim} of {tensor.spec!r}, which is sharded already",
            f"call zigzag(x, {dim}, {axis!r}) on a tensor that is not sharded in that dim, e.g. x.redistribute(P())",
        )
    arranged = _ordered(tensor, dim, zigzag_order(tensor.shape[dim], tensor.device_mesh.size(index)))
    placements = list(tensor.placements)
    placements[index] = Shard(dim)
    return arranged.redistribute(placements=placements)


def unzigzag(tensor: DTensor, dim: int, axis: str | int) -> DTensor:
    """Return the sequence in its original order, replicated over the mesh axis.

    >>> x = zigzag(distribute_tensor(torch.arange(8), mesh, [Replicate()]), 0, "cp")
    >>> unzigzag(x, 0, "cp").tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    dim, index = _place(tensor, dim, axis)
    placements = list(tensor.placements)
    placements[index] = Replicate()
    order = zigzag_order(tensor.shape[dim], tensor.device_mesh.size(index))
    back = sorted(range(len(order)), key=order.__getitem__)
    return _ordered(tensor.redistribute(placements=placements), dim, back)


def _place(tensor: DTensor, dim: int, axis: str | int) -> tuple[int, int]:
    """Return the dim, not negative, and the index of the axis."""
    names = tensor.spec.mesh_info.names
    if isinstance(axis, str) and axis not in names:
        raise InputError(
            f"{tensor.spec!r} is on {tensor.spec.mesh_info!r}, which has no axis {axis!r}",
            f"use one of {', '.join(names)}",
        )
    return dim % tensor.dim(), names.index(axis) if isinstance(axis, str) else axis % len(names)


def _ordered(tensor: DTensor, dim: int, order: Sequence[int]) -> DTensor:
    with implicit_replication():  # the order is the same on all ranks
        index = torch.tensor(order, device=tensor.device)
        result = tensor.index_select(dim, index)
    return cast(DTensor, result)
