"""`cross_entropy` of scores whose classes are sharded, as one node of autograd, whose backward communicates nothing.

PyTorch decomposes it into a `log_softmax` and an `nll_loss`. The gradient of `log_softmax` needs, for each row, the sum
of its incoming gradient over all classes, which is a reduction over the ranks. But the incoming gradient is that of
`nll_loss`: one number in each row, at the target, which every rank knows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from .._torch.above_autograd import Keys, call_original
from .._torch.autograd import Context, QuickFunction
from .._torch.ops import OpOverload
from ..sharding.base import DTensorBase
from ..sharding.layout import dim_axes
from .above_autograd import call, is_ours, needs_grad, new_op
from .call import Call
from .kernel import FactorShard, Kernel, LocalCall, without_communication
from .loss import MEAN, scores_and_row
from .reduce import wide
from .registry import definitions_in

define = definitions_in(__name__)

# ---- on local shards ------------------------------------------------------------------------------------------------


def gradient_of_scores(
    gradient: Tensor,
    log_probabilities: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    total_weight: Tensor | None,
    first_class: int = 0,
) -> Tensor:
    """Return the gradient of the scores of some classes: probabilities minus one at the target, times a factor per row.

    The factor is the gradient of the row's loss; `total_weight` is what a mean divides by, None for other reductions.
    """
    dim = min(1, log_probabilities.dim() - 1)
    counted = target != ignore_index
    factor = gradient.to(wide(gradient.dtype))
    if total_weight is not None:
        factor = factor / total_weight
    if weight is not None:
        factor = factor * weight[torch.where(counted, target, 0)]
    factor = torch.where(counted, factor, 0.0).unsqueeze(dim)
    result = log_probabilities.to(factor.dtype).exp() * factor
    local = target - first_class
    mine = counted & (local >= 0) & (local < log_probabilities.shape[dim])
    at_target = torch.where(mine.unsqueeze(dim), -factor, 0.0)
    result.scatter_add_(dim, torch.where(mine, local, 0).unsqueeze(dim), at_target)
    return result.to(log_probabilities.dtype)


cross_entropy_gradient = new_op(
    "cross_entropy_gradient(Tensor gradient, Tensor log_probabilities, Tensor target, Tensor? weight, "
    "SymInt ignore_index, Tensor? total_weight) -> Tensor",
    gradient_of_scores,
)


def _gradient_rule(call: Call) -> str:
    """Return the rule of the gradient of the scores, linear in the incoming gradient; a kernel handles the classes."""
    scores, row = scores_and_row(call.ndim(1), "n", "v")
    return f"{row if call.ndim(0) else ''}, {scores}, {row}, [c], -> {scores} ; linear 0 ; kernel v"


@without_communication
def _gradient_of_local_classes(call: LocalCall, shard: FactorShard) -> Tensor:
    """Return the gradient of the scores of this rank's classes."""
    scores = call["log_probabilities"]
    if not scores.numel():
        return call.zeros(scores)
    first = call.given[1].offset(call.at)[min(1, scores.dim() - 1)]
    rest = call["target"], call["weight"], call["ignore_index"], call["total_weight"]
    return gradient_of_scores(call["gradient"], scores, *rest, first)


# ---- above autograd -------------------------------------------------------------------------------------------------

_aten = torch.ops.aten


class _Saved(Context, Protocol):
    reduction: int
    ignored: int


class _CrossEntropy(QuickFunction):
    """Returns the loss, and the log-probabilities, through which gradients of gradients flow."""

    @staticmethod
    def forward(
        ctx: _Saved, scores: DTensorBase, target: DTensorBase, weight: DTensorBase | None, reduction: int, ignored: int
    ) -> tuple[DTensorBase, DTensorBase]:
        ctx.set_materialize_grads(False)
        logs = call(_aten._log_softmax.default, scores, min(1, scores.dim() - 1), False)
        loss, total = call(_aten.nll_loss_forward.default, logs, target, weight, reduction, ignored)
        ctx.save_for_backward(logs, target, weight, total)
        ctx.reduction, ctx.ignored = reduction, ignored
        return loss, logs

    @staticmethod
    def backward(ctx: _Saved, of_loss: Tensor | None, of_logs: Tensor | None) -> tuple[Tensor | None, ...]:
        logs, target, weight, total = ctx.saved_tensors
        result = None
        if isinstance(of_loss, DTensorBase) and not torch.is_grad_enabled():
            mean = total if ctx.reduction == MEAN else None
            result = call(cross_entropy_gradient, of_loss, logs, target, weight, ctx.ignored, mean)
        elif of_loss is not None:  # by PyTorch's ops, which have derivatives
            found = _aten.nll_loss_backward(of_loss, logs, target, weight, ctx.reduction, ctx.ignored, total)
            of_logs = found if of_logs is None else of_logs + found
        if of_logs is not None:
            through = _aten._log_softmax_backward_data(of_logs, logs, min(1, logs.dim() - 1), logs.dtype)
            result = through if result is None else result + through
        return result, None, None, None, None


def _is_valid(scores: Tensor, target: Tensor, weight: Tensor | None) -> bool:
    """Return whether the arguments fit each other; PyTorch has its own errors for those that do not."""
    if target.dtype != torch.int64 or target.shape != scores.shape[:-1]:
        return False
    return weight is None or (weight.shape == scores.shape[-1:] and weight.dtype == scores.dtype)


def _shards_classes(scores: DTensorBase) -> bool:
    dims = scores._spec.layout.dims
    return 1 <= len(dims) <= 2 and bool(dim_axes(dims[-1]))


def _override(func: OpOverload) -> Callable[..., object]:
    """Return the override: one autograd node for the logarithms of the softmax and the loss."""

    def kernel(
        keys: Keys,
        scores: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        reduction: int = MEAN,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
    ) -> object:
        tensors = (scores, target) if weight is None else (scores, target, weight)
        if (
            is_ours(tensors)
            and needs_grad((scores,))
            and not (needs_grad(tensors[2:]) or label_smoothing)
            and isinstance(scores, DTensorBase)
            and _shards_classes(scores)
            and _is_valid(scores, target, weight)
        ):
            return _CrossEntropy.apply(scores, target, weight, reduction, ignore_index)[0]
        return call_original(func, keys, scores, target, weight, reduction, ignore_index, label_smoothing)

    return kernel


define("aten::cross_entropy_loss", override=_override)
define(
    "shardwise::cross_entropy_gradient",
    _gradient_rule,
    python=gradient_of_scores,
    kernels={"v": Kernel(_gradient_of_local_classes, 0, 0.0)},
)
