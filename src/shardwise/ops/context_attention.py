"""`scaled_dot_product_attention` of tensors that are sharded by position: the method, and the derivative.

    ring     blocks of keys and values travel from rank to rank, see `ring_attention`
    heads    an all-to-all of queries, keys and values from positions to heads, attention, and one of the output back
    gather   every rank gathers all keys and values

By default the cost model chooses between the first two. Per rank, a ring receives the keys and values of all others;
an all-to-all a share of the queries, keys, values and outputs, but it needs a number of heads that the ranks divide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._torch.above_autograd import Keys
from .._torch.autograd import QuickFunction
from .._torch.ops import OpOverload
from .._torch.transforms import autocast_enabled, forward_derivative_active, transforms_active
from ..comm.on_ranks import from_ranks
from ..errors import InputError
from ..sharding.base import DTensorBase
from ..sharding.layout import Factor, Layout, dim_axes
from ..sharding.mesh import MeshInfo
from ..sharding.spec import DTensorSpec, contiguous_meta
from .above_autograd import are_distributed, call, needs_grad
from .attention_dropout import draw_dropout
from .attention_method import HEADS, SEQUENCE, by_position, choose_method, over_heads, sequence_axes, zigzag_ranks
from .modes import modes
from .registry import definitions_in
from .ring_attention import ring_attention, ring_attention_backward
from .sequence_options import Method, sequence_mode

define = definitions_in(__name__)


class Attention(NamedTuple):
    """The arguments of an attention besides queries, keys and values."""

    mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    documents: tuple[int, ...] = ()
    """Where packed documents begin, and the end of the last one."""
    zigzag: int = 0
    """The number of ranks for which the sequence is in head-tail order."""


# ---- running it -----------------------------------------------------------------------------------------------------


def attend_over_sequence(
    query: DTensorBase, key: DTensorBase, value: DTensorBase, given: Attention, method: Method | None = None
) -> Tensor:
    """Return the attention of DTensors `[batch, heads, positions, features]` whose positions are sharded."""
    specs = query._spec, key._spec, value._spec
    axes = sequence_axes(*specs[1:])
    chosen = method or sequence_mode().method
    if chosen is None and modes.explicit:
        chosen = "ring"  # one op, which is refused with its name
    if chosen is None:
        chosen = choose_method(*specs, training=needs_grad((query, key, value))).method
    if chosen == "heads":
        return _by_heads((query, key, value), axes, given)
    return _ring(query, key, value, given, "gather" if chosen == "gather" else "ring")


def _by_heads(tensors: Sequence[DTensorBase], axes: tuple[int, ...], given: Attention) -> Tensor:
    targets = [over_heads(tensor._spec.layout, axes) for tensor in tensors]
    if any(target is None for target in targets):
        text = ", ".join(repr(tensor._spec) for tensor in tensors)
        raise InputError(
            f"attention by heads of {text}: the ranks that share the sequence do not divide the heads of all three",
            'use attention_over_sequence(method="ring"), or a number of ranks that divides the heads of keys',
        )
    query, key, value = (_to_layout(tensor, target) for tensor, target in zip(tensors, targets, strict=True))
    if given.documents or given.zigzag:
        output: Any = _ring(query, key, value, given, "ring")
    else:
        output = F.scaled_dot_product_attention(
            query, key, value, given.mask, given.dropout_p, given.is_causal, scale=given.scale, enable_gqa=True
        )
    return _to_layout(output, by_position(output._spec.layout, axes))


def _to_layout(tensor: Any, layout: Layout | None) -> DTensorBase:
    assert layout is not None
    target = DTensorSpec.from_layout(tensor._spec.mesh_info, layout, tensor._spec.tensor_meta)
    return tensor.redistribute(placements=target.placements_alone)


def _ring(query: DTensorBase, key: DTensorBase, value: DTensorBase, given: Attention, rotate: str) -> DTensorBase:
    mesh_info = query._spec.mesh_info
    mask = None if given.mask is None else _distributed(given.mask, mesh_info)
    dropout = None
    if given.dropout_p > 0:
        weights = contiguous_meta((*query.shape[:3], key.shape[2]), query.dtype)
        drawn = draw_dropout(mesh_info, weights, given.dropout_p, query._local_shard.device)
        dropout = _replicated(drawn, mesh_info)
    scale = 1.0 / math.sqrt(query.shape[-1]) if given.scale is None else given.scale
    rest = mask, dropout, given.dropout_p, given.is_causal, scale, list(given.documents), given.zigzag, rotate
    if needs_grad((query, key, value)):
        return _RingAttention.apply(query, key, value, *rest)
    return call(ring_attention, query, key, value, *rest)[0]


class _RingAttention(QuickFunction):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        dropout: Tensor | None,
        *numbers: object,
    ) -> Tensor:
        output, logsumexp = call(ring_attention, query, key, value, mask, dropout, *numbers)
        ctx.save_for_backward(query, key, value, output, logsumexp, mask, dropout)
        ctx.numbers = numbers
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, logsumexp, mask, dropout = ctx.saved_tensors
        found = call(
            ring_attention_backward, gradient, query, key, value, output, logsumexp, mask, dropout, *ctx.numbers
        )
        if query._spec.mesh_info.device_type == "cpu":
            fused = dropout is None and all(tensor.stride(-1) == 1 for tensor in (query, key, value))
            found = _as_on_cpu(found, fused)
        if torch.is_grad_enabled() and needs_grad((gradient, query, key, value)):  # with create_graph=True
            found = _OnceDifferentiable.apply(*found, gradient, query, key, value)
        return *found, *[None] * (2 + len(ctx.numbers))


def _as_on_cpu(gradients: Sequence[Tensor], fused: bool) -> tuple[Tensor, ...]:
    """Return the gradients of queries, keys and values in the memory order in which PyTorch makes them on the CPU.

    Its fused kernel has positions outside heads. Products of matrices leave the keys transposed, as they are in scores,
    unless several query heads share them and are added up.
    """
    if fused:
        return tuple(g.transpose(HEADS, SEQUENCE).contiguous().transpose(HEADS, SEQUENCE) for g in gradients)
    query, key, value = gradients
    shared = query.shape[HEADS] != key.shape[HEADS]
    return query.contiguous(), key.contiguous() if shared else key.mT.contiguous().mT, value.contiguous()


class _OnceDifferentiable(QuickFunction):
    """Returns the gradients of a ring attention unchanged, as a node whose backward raises an error."""

    @staticmethod
    def forward(ctx: object, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(gradient.view_as(gradient) for gradient in tensors[:3])

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> tuple[Tensor, ...]:
        raise NotImplementedError(  # a RuntimeError, as on one device
            "attention over a sequence that is sharded by position has no second derivative: "
            "gather keys and values before it, as in k.redistribute(placements=[Replicate()])"
        )


def _distributed(tensor: Tensor, mesh_info: MeshInfo) -> DTensorBase:
    """Return a mask as a DTensor; a plain one is the same on all ranks."""
    if isinstance(tensor, DTensorBase):
        return tensor
    return _replicated(from_ranks(mesh_info, lambda at: tensor), mesh_info)


def _replicated(local: Tensor, mesh_info: MeshInfo) -> DTensorBase:
    """Wrap a tensor that is the same on every rank as a replicated DTensor."""
    shape = tuple(local.shape)
    layout = Layout.make(mesh_info.sizes, tuple((Factor(size, ()),) for size in shape))
    spec = DTensorSpec.from_layout(mesh_info, layout, contiguous_meta(shape, local.dtype))
    return DTensorBase.concrete.wrap(local, spec)


# ---- above autograd -------------------------------------------------------------------------------------------------


def _override(func: OpOverload) -> Callable[..., object]:
    """Override the op where keys or values are sharded by position; return NotImplemented for all other calls."""

    def kernel(
        keys: Keys,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> object:
        tensors: Sequence[Any] = (query, key, value)
        if not _is_served(tensors, attn_mask, is_causal, enable_gqa):
            _refuse_head_tail_order(tensors, is_causal)
            return NotImplemented
        if autocast_enabled() and torch.is_autocast_enabled(query.device.type):
            dtype = torch.get_autocast_dtype(query.device.type)
            tensors = [tensor if tensor.dtype == torch.float64 else tensor.to(dtype) for tensor in tensors]
        zigzag = zigzag_ranks(*(tensor._spec for tensor in tensors))
        given = Attention(attn_mask, dropout_p, is_causal, scale, zigzag=zigzag)
        return attend_over_sequence(tensors[0], tensors[1], tensors[2], given)

    return kernel


def _is_served(tensors: Sequence[Any], mask: Tensor | None, is_causal: bool, enable_gqa: bool) -> bool:
    """Return whether keys or values are sharded by position, in a call that is valid and that a ring can compute."""
    for tensor in tensors:
        if not isinstance(tensor, DTensorBase) or tensor.dim() != 4:
            return False
    query, key, value = tensors
    mesh_info = query._spec.mesh_info
    if not mesh_info is key._spec.mesh_info is value._spec.mesh_info:
        return False
    axes = sequence_axes(key._spec, value._spec)
    if not axes or math.prod(mesh_info.sizes[axis] for axis in axes) == 1:
        return False
    if mask is not None and (is_causal or mask.requires_grad or not _is_known(mask, mesh_info)):
        return False
    heads_fit = query.shape[1] == key.shape[1] or (enable_gqa and query.shape[1] % max(1, key.shape[1]) == 0)
    shapes_fit = (
        key.shape[:3] == value.shape[:3]
        and query.shape[0] == key.shape[0]
        and query.shape[2:] == key.shape[2:]
        and query.shape[-1] > 0
        and heads_fit
    )
    dtypes_fit = query.is_floating_point() and query.dtype == key.dtype == value.dtype
    return shapes_fit and dtypes_fit and not transforms_active() and not forward_derivative_active()


def _refuse_head_tail_order(tensors: Sequence[Tensor], is_causal: bool) -> None:
    """Raise an error if a causal mask would not follow the positions of a sequence in head-tail order."""
    if not is_causal or not sequence_mode().zigzag or not are_distributed(tensors):
        return
    specs = [tensor._spec for tensor in tensors]
    if any(dim_axes(spec.layout.dims[-2]) for spec in specs if len(spec.shape) > 1):
        text = ", ".join(map(repr, specs))
        raise InputError(
            f"causal attention in head-tail order of {text}: only a ring's causal mask follows that order",
            "pass [batch, heads, positions, features] with all positions sharded alike, outside of torch.func, "
            "or leave the order with attention_over_sequence(zigzag=False)",
        )


def _is_known(mask: Tensor, mesh_info: MeshInfo) -> bool:
    """Return whether a mask is on this mesh, or a plain tensor that is taken as replicated."""
    if isinstance(mask, DTensorBase):
        return mask._spec.mesh_info is mesh_info
    return modes.implicit_replication


# PyTorch calls one of the ops of `attention`, or decomposes this op into products, with a causal mask that it makes.
define("aten::scaled_dot_product_attention", makes_tensors=True, override=_override)
