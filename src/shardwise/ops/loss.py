"""Losses for each element, losses for each row of scores, and the negative log likelihood of a class.

A sum over sharded elements or rows is a partial sum. A mean divides by the global number of terms, not the local one.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .._torch.above_autograd import Keys
from .._torch.fake_tensors import has_readable_values
from .._torch.ops import OpOverload, schema_of
from ..notation.build import pointwise
from ..sharding.recording import recorded
from .above_autograd import where_distributed
from .call import Call
from .kernel import FactorShard, Kernel, KernelRun, LocalCall, LocalResult, Reduce, without_communication
from .op import Local
from .registry import definitions_in, resolve

define = definitions_in(__name__)

NONE, MEAN, SUM = 0, 1, 2
"""The values of a `reduction` argument."""


def _reduced(call: Call, pattern: str) -> str:
    """Return the pattern of a loss, or of its gradient, whose terms have this pattern: a mean or a sum has no dims."""
    return pattern if call.arg("reduction") == NONE else ""


# ---- on local shards ------------------------------------------------------------------------------------------------

CountTerms = Callable[[LocalCall, int], tuple[int, int]]
"""From a call and the position of the scores among its operands to the number of terms of a mean: local and global."""


def _elements(call: LocalCall, scores: int) -> tuple[int, int]:
    return call["self"].numel(), math.prod(call.given[scores].shape)


def _rows(call: LocalCall, scores: int) -> tuple[int, int]:
    shape = call.given[scores].shape
    return (call["self"].shape[0], shape[0]) if len(shape) == 2 else (1, 1)


def _forward(count: CountTerms) -> Local:
    """Run the op; if other ranks have terms too, its result is their sum, or this rank's share of the mean."""

    def run(call: LocalCall) -> LocalResult:
        local, total = count(call, 0)
        if local == total:
            return call.run()
        single = len(call.dtypes) == 1
        if call["self"].numel():
            results = [call.run()] if single else list(call.run())
        else:
            results = [call.zeros(call["self"], result) for result in range(len(call.dtypes))]
        if call["reduction"] == MEAN:
            results[0] = results[0] * (local / total)
        return results[0] if single else tuple(results)

    return Local(run)


def _backward(count: CountTerms) -> Local:
    """Run the op with the gradient of this rank's share of the mean: it divides by the local number of terms."""

    def run(call: LocalCall) -> LocalResult:
        if not call["self"].numel():
            return call.zeros(call["self"])
        local, total = count(call, 1)
        if local == total or call["reduction"] != MEAN:
            return call.run()
        return call.run(grad_output=call["grad_output"] * (local / total))

    return Local(run)


# ---- losses of each element -----------------------------------------------------------------------------------------


def _elementwise(operands: int) -> Callable[[Call], str]:
    """Return the rule of a loss of each element, and of their sum or mean, as `reduction` says."""
    inputs = pointwise(operands).partition("->")[0]
    return lambda call: f"{inputs}-> {_reduced(call, 'b..')}"


def _elementwise_backward(operands: int) -> Callable[[Call], str]:
    """Return the rule of the gradient of such a loss, which is linear in the incoming gradient."""
    return lambda call: f"{_reduced(call, 'b?..')}{', b?..' * operands} -> b.. ; linear 0"


for _losses, _operands in (
    (("mse_loss", "smooth_l1_loss", "huber_loss"), 2),
    (("soft_margin_loss",), 2),
    (("binary_cross_entropy",), 3),  # the last one is a weight that broadcasts
):
    define([f"aten::{loss}" for loss in _losses], _elementwise(_operands), local=_forward(_elements), strides="as run")
    define(
        [f"aten::{loss}_backward" for loss in _losses],
        _elementwise_backward(_operands),
        local=_backward(_elements),
        strides="as run",
    )
define("aten::binary_cross_entropy_with_logits", _elementwise(4), local=_forward(_elements))


# ---- losses of each row of scores -----------------------------------------------------------------------------------


def _row_rule(template: str, scores: int) -> Callable[[Call], str]:
    """Return the rule with {x} like the scores, {row} like one value per row, {loss} like the loss or its gradient.

    Rows may be sharded, classes may not. A single row of scores has no dim for rows, or one of size 1.
    """

    def rule(call: Call) -> str:
        x, row = ("n [c]", "n") if call.ndim(scores) == 2 else ("_..", "_..")
        return template.format(x=x, row=row, loss=_reduced(call, row))

    return rule


define("aten::multi_margin_loss", _row_rule("{x}, {row}, [c] -> {loss}", 0), local=_forward(_rows))
define(
    "aten::multi_margin_loss_backward",
    _row_rule("{loss}, {x}, {row}, [c] -> {x} ; linear 0", 1),
    local=_backward(_rows),
)
# Several targets for each row, which are also returned as a mask.
define("aten::multilabel_margin_loss_forward", _row_rule("{x}, {x} -> {loss}, {x}", 0), local=_forward(_rows))
define(
    "aten::multilabel_margin_loss_backward",
    _row_rule("{loss}, {x}, {x}, {x} -> {x} ; linear 0", 1),
    local=_backward(_rows),
)


# ---- the likelihood of a class --------------------------------------------------------------------------------------

_IGNORED = -100


def scores_and_row(ndim: int, name: str, classes: str) -> tuple[str, str]:
    """Return the patterns of scores, with the classes in dim 1 or in the only dim, and of one value for each row."""
    dims = [classes if dim == min(1, ndim - 1) else f"{name}{dim}" for dim in range(ndim)]
    return " ".join(dims), " ".join(dim for dim in dims if dim != classes)


def _nll_rule(call: Call) -> str:
    """Return the rule: a sum needs no communication over classes `v`, it is Partial.

    A mean is reduced over classes `k` and rows `r`.
    """
    mean = call.arg("reduction") == MEAN
    classes = "k" if mean else "v"
    scores, row = scores_and_row(call.ndim(0), "r" if mean else "n", classes)
    kernel = [classes, *row.split()] if mean else [classes]
    clauses = f"{'reduce none ; ' if mean else ''}kernel {', '.join(kernel)}"
    return f"{scores}, {row}, {classes} -> {_reduced(call, row)}, ; {clauses}"


def _nll_backward_rule(call: Call) -> str:
    """Return the rule: each rank computes the gradients of its classes."""
    scores, row = scores_and_row(call.ndim(1), "n", "v")
    return f"{_reduced(call, row)}, {scores}, {row}, v, -> {scores} ; linear 0 ; kernel v"


def _check_classes(target: Tensor, counted: Tensor, classes: int) -> None:
    """Raise the error of one device for a target that is no class."""
    wrong = target[counted & ((target < 0) | (target >= classes))]
    if wrong.numel():
        raise IndexError(f"Target {wrong.flatten()[0].item()} is out of bounds.")


def _local_targets(call: LocalCall, scores: int) -> Tensor:
    """Return the targets among this rank's classes, relative to its first class; all others are to be ignored."""
    layout, target = call.given[scores], call["target"]
    dim = min(1, len(layout.dims) - 1)
    counted = target != call["ignore_index"]
    if has_readable_values(target):
        recorded(_check_classes, target, counted, layout.shape[dim])
    local = target - layout.offset(call.at)[dim]
    return torch.where(counted & (local >= 0) & (local < call["self"].shape[dim]), local, _IGNORED)


def _local_nll(call: LocalCall, reduction: int) -> tuple[Tensor, Tensor]:
    """Return the loss and the weight of the targets among this rank's classes."""
    if not call["self"].numel():
        return call.zeros(call["self"], 0), call.zeros(call["self"], 1)
    found: tuple[Tensor, Tensor] = call.run(target=_local_targets(call, 0), ignore_index=_IGNORED, reduction=reduction)
    return found


@without_communication
def nll(call: LocalCall, shard: FactorShard) -> tuple[Tensor, Tensor]:
    """Return the loss of the targets among this rank's classes; other rows are zero."""
    return _local_nll(call, call["reduction"])


def nll_mean(call: LocalCall, shard: FactorShard) -> KernelRun:
    """Divide by the weight of all targets: two numbers are summed over the ranks."""
    loss, weight = yield Reduce(torch.stack(_local_nll(call, SUM)))
    return loss / weight, weight


@without_communication
def nll_backward(call: LocalCall, shard: FactorShard) -> Tensor:
    """Compute the gradients of targets among this rank's classes."""
    if not call["self"].numel():
        return call.zeros(call["self"])
    gradient: Tensor = call.run(target=_local_targets(call, 1), ignore_index=_IGNORED)
    return gradient


define(
    ("aten::nll_loss_forward", "aten::nll_loss2d_forward"),
    _nll_rule,
    kernels={
        "v": Kernel(nll, 0, 0.0),
        "k": Kernel(nll_mean, joint=True),
        "r": Kernel(nll_mean, joint=True, anywhere=True),
    },
    strides="row-major",
)
define(
    ("aten::nll_loss_backward", "aten::nll_loss2d_backward"),
    _nll_backward_rule,
    kernels={"v": Kernel(nll_backward, 0, 0.0)},
)


# ---- losses that PyTorch composes of other ops ----------------------------------------------------------------------


def _linear_cross_entropy(func: OpOverload) -> Callable[..., object]:
    """Return the override of a linear layer's cross entropy in chunks: sharded logits are small, so it takes one.

    The variant that reduces also returns gradients; they are left empty, since autograd computes them.
    """
    gradients = len(schema_of(func).returns) - 1

    def run(keys: Keys, *args: object, **kwargs: object) -> Tensor | tuple[Tensor, ...]:
        named = {"reduction": "none", "label_smoothing": 0.0, **resolve(func).arguments(args, kwargs)}
        logits = F.linear(named["input"], named["linear_weight"], named["linear_bias"])
        options = {name: named[name] for name in ("reduction", "ignore_index", "label_smoothing")}
        weight = named["weight"]
        weight = weight.detach() if isinstance(weight, Tensor) else weight  # the op has no derivative for it
        loss = F.cross_entropy(logits, named["target"], weight, **options)
        return (loss, *(logits.new_empty(0) for _ in range(gradients))) if gradients else loss

    return where_distributed(func, run)


define("aten::ctc_loss", makes_tensors=True)
define(
    (
        "torch_nn::_linear_cross_entropy_batch_chunked",
        "torch_nn::_linear_cross_entropy_batch_chunked_no_reduction",
    ),
    override=_linear_cross_entropy,
)
