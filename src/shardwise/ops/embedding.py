"""Embeddings: look-ups of rows in a table that may be sharded by row, bags of such rows, and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from .._torch.above_autograd import Keys, call_original, call_with_autograd
from .._torch.autograd import Context, QuickFunction, in_backward
from .._torch.ops import OpOverload, schema_of
from .._torch.transforms import anything_transforms
from ..errors import InputError
from ..sharding.base import DTensorBase
from ..sharding.spec import DTensorSpec
from .above_autograd import call, is_watched, needs_grad, new_op, where_distributed
from .call import Call
from .indexing import free, kept, shifted
from .kernel import FactorShard, LocalCall, no_summand, without_communication
from .op import Never
from .registry import definitions_in
from .replicated import as_replicated

aten = torch.ops.aten
define = definitions_in(__name__)

_embedding = aten.embedding.default

# ---- one row for each index -----------------------------------------------------------------------------------------


@without_communication
def embedding(call: LocalCall, shard: FactorShard) -> Tensor:
    """Look up the rows that this rank holds; the others are zeros in a sum."""
    weight, (index, hit) = call["weight"], shifted(call["indices"], shard)
    if not shard.held:
        return no_summand(weight, call.local_shape())
    return kept(hit.unsqueeze(-1), torch.embedding(weight, index.where(hit, 0)))


def embedding_backward_rule(call: Call) -> str:
    """Return the rule: indices may be sharded, unless gradients are scaled by how often each index occurs."""
    rows = "[i..]" if call.arg("scale_grad_by_freq") else "i.."
    return f"{rows} d, {rows} -> v d ; linear 0 ; num_weights=(v) ; kernel v"


@without_communication
def embedding_backward(call: LocalCall, shard: FactorShard) -> Tensor:
    """Add up the gradients of the rows that this rank holds; all others go to an extra row, marked as padding."""
    index, hit = shifted(call["indices"], shard)
    if call["padding_idx"] >= 0:
        hit = hit & (call["indices"] != call["padding_idx"])
    grad, rows = call["grad_output"], shard.held
    index = index.where(hit, rows)
    wide = aten.embedding_dense_backward.default(grad, index, rows + 1, rows, call["scale_grad_by_freq"])
    return wide[:rows]


def weight_gradient(
    grad_output: Tensor, indices: Tensor, weight: Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Tensor:
    """Return the gradient of a table of `num_weights` rows.

    `weight` is not read, only its layout matters (`gradient_of`).
    """
    return aten.embedding_dense_backward.default(grad_output, indices, num_weights, padding_idx, scale_grad_by_freq)


_weight_gradient = new_op(
    "embedding_weight_gradient(Tensor grad_output, Tensor indices, Tensor weight, SymInt num_weights, "
    "SymInt padding_idx, bool scale_grad_by_freq) -> Tensor",
    weight_gradient,
)


class _Saved(Context, Protocol):
    spec: DTensorSpec
    options: tuple[int, bool]


class _Embedding(QuickFunction):
    """An embedding whose backward pass knows the layout of the table.

    PyTorch's formula knows the table's size only. But how a gradient is best computed depends on the layout it will
    have: for a replicated table it is cheaper to sum a Partial gradient of a few looked-up rows than one of all rows.
    """

    @staticmethod
    def forward(ctx: _Saved, weight: DTensorBase, indices: Tensor, padding_idx: int, scale: bool) -> DTensorBase:
        ctx.spec, ctx.options = weight._spec, (padding_idx, scale)
        result: DTensorBase = call(_embedding, weight, indices, padding_idx, scale)
        # Plain indices were accepted as replicated; the backward pass may run where plain tensors are not.
        ctx.save_for_backward(indices if isinstance(indices, DTensorBase) else as_replicated(indices, weight))
        return result

    @staticmethod
    def backward(ctx: _Saved, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (indices,) = ctx.saved_tensors
        rows = ctx.spec.shape[0]
        if torch.is_grad_enabled() or is_watched() or not isinstance(gradient, DTensorBase):
            # By an op that has a derivative, and that dispatch modes know.
            made = aten.embedding_dense_backward.default(gradient, indices, rows, *ctx.options)
        else:
            table = gradient.wrap(gradient._local_shard, ctx.spec)  # any local shard will do: it is not read
            made = call(_weight_gradient, gradient, indices, table, rows, *ctx.options)
        return made, None, None, None


def _override(func: OpOverload) -> Callable[..., object]:
    """Return the override: an autograd node whose backward keeps the layout of the table."""

    def kernel(
        keys: Keys, weight: Tensor, indices: Tensor, padding_idx: int = -1, scale: bool = False, sparse: bool = False
    ) -> object:
        known = weight.dim() == 2 and (type(indices) is Tensor or isinstance(indices, DTensorBase))
        if not isinstance(weight, DTensorBase) or not known or sparse or anything_transforms() or is_watched():
            return call_with_autograd(func, keys, weight, indices, padding_idx, scale, sparse)
        if needs_grad((weight,)):
            return _Embedding.apply(weight, indices, padding_idx, scale)
        return call(func, weight, indices, padding_idx, scale)

    return kernel


def limit_rows(table: Tensor, rows: Tensor, max_norm: float, norm_type: float) -> Tensor:
    """Scale the rows of a table that are looked up down to a norm, in place."""
    length = aten.linalg_vector_norm(table, norm_type, [1], True)
    used = torch.zeros_like(length).index_fill(0, rows.flatten(), 1.0) > 0
    scale = torch.where(used & (length > max_norm), max_norm / (length + 1e-7), 1.0)
    return table.mul_(scale)


def _one_hot(func: OpOverload) -> Callable[..., object]:
    """Return the override of `one_hot`.

    For tensor subclasses PyTorch compares with all classes, and accepts any number; a scatter raises the error for a
    class out of range.
    """

    def run(keys: Keys, classes: Tensor, num_classes: int = -1) -> object:
        if classes.dtype is not torch.int64:
            return call_original(func, keys, classes, num_classes)  # raises the error
        if num_classes == -1 and not classes.numel():
            raise RuntimeError("one_hot cannot infer the number of classes from an empty tensor: pass num_classes")
        count = int(classes.max()) + 1 if num_classes == -1 else num_classes
        if count < 1:
            raise RuntimeError(f"one_hot with {count} classes: classes are at least 0, and num_classes at least 1")
        zeros = torch.zeros_like(classes).unsqueeze(-1).expand(*classes.shape, count)
        return zeros.scatter(-1, classes.unsqueeze(-1), 1)

    return where_distributed(func, run)


define(
    "aten::embedding",
    "v d, i.. -> i.. d ; linear 0 ; kernel v",
    kernels=free(embedding),
    override=_override,
    batch_rule_makes_tensors=True,
)
define("aten::embedding_dense_backward", embedding_backward_rule, kernels=free(embedding_backward))
define(
    "shardwise::embedding_weight_gradient",
    embedding_backward_rule,
    kernels=free(embedding_backward),
    gradient_of="weight",
)
define("aten::embedding_renorm_", decomposition=limit_rows)
define("aten::one_hot", override=_one_hot)

# ---- bags of rows ---------------------------------------------------------------------------------------------------


def bag_backward(call: Call) -> str | None:
    """Return the rule of the gradients of bags; None for a sparse gradient (see `dense_bag_gradient`)."""
    return None if call.arg("sparse") else "[b] [d], [i..], [o], [t..], [s..], [m..], [w..] -> _ [d] ; linear 0"


_BAG_BACKWARD = aten._embedding_bag_backward.default
_SPARSE = [argument.name for argument in schema_of(_BAG_BACKWARD).arguments].index("sparse")


def dense_bag_gradient(*args: object, **kwargs: object) -> Tensor:
    """Return the gradient of a bag of embeddings, dense although `sparse=True` was asked for (see `dense`)."""
    if not args[_SPARSE]:
        return NotImplemented
    return _BAG_BACKWARD(*args[:_SPARSE], False, *args[_SPARSE + 1 :], **kwargs)


define(
    ("aten::_embedding_bag", "aten::_embedding_bag_forward_only"),
    Never("on CPUs, tensors saved for backward have other sizes than metadata say"),
)
define("aten::_embedding_bag_backward", bag_backward, decomposition=dense_bag_gradient)
define("aten::_embedding_bag_dense_backward", "[b] [d], [i..], [o..], [s..], [m..], [w..] -> _ [d] ; linear 0")
define("aten::_embedding_bag_per_sample_weights_backward", "_ d, _ d, _.., _.., _.. -> _.. ; linear 0 | 1")

# ---- sparse gradients -----------------------------------------------------------------------------------------------


def dense(
    sparse_dim: int, dense_dim: int, size: list[int], indices: Tensor, values: Tensor, **_options: object
) -> Tensor:
    """Return a dense gradient in place of a sparse one: the sum of the values at each index.

    A leaf's gradient has the leaf's placements, and a sparse tensor has no dims that could be sharded.
    """
    if not in_backward():
        raise InputError(
            "torch.sparse_coo_tensor of distributed indices and values: a distributed tensor is dense",
            "add the values to a dense tensor: zeros.index_put(indices.unbind(0), values, accumulate=True)",
        )
    return values.new_zeros(size).index_put(tuple(indices.unbind(0)), values, accumulate=True)


define("aten::_sparse_coo_tensor_with_dims_and_tensors", decomposition=dense)
