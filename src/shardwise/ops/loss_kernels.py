"""Losses: means over all elements, whatever a rank holds of them, and likelihoods of classes that are cut."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .call import Call
from .kernel import Cut, Kernel, KernelRun, LocalCall, Reduce
from .loss import ELEMENTWISE, MEAN, NONE, SUM
from .tables import LOCAL, register


def _share(call: LocalCall, operand: int, local: Tensor, rows: bool) -> tuple[int, int]:
    """How many terms the mean has: here, and in all."""
    shape = call.given[operand].shape
    if not rows:
        return local.numel(), math.prod(shape)
    return (local.shape[0], shape[0]) if len(shape) == 2 else (1, 1)


def _forward(rows: bool) -> Callable[[LocalCall], Any]:
    """The op, but where terms are on other ranks: then its sum, or its share of the mean."""

    def run(call: LocalCall) -> Any:
        x = call["self"]
        here, whole = _share(call, 0, x, rows)
        if here == whole:
            return call.run()
        single = len(call.dtypes) == 1
        made = call.run() if x.numel() else None
        results = list(_nothing(call) if made is None else [made] if single else made)
        if call["reduction"] == MEAN:
            results[0] = results[0] * (here / whole)
        return results[0] if single else tuple(results)

    return run


def _nothing(call: LocalCall) -> list[Tensor]:
    x = call["self"]
    return [x.new_zeros(call.local_shape(i), dtype=dtype) for i, dtype in enumerate(call.dtypes)]


def _backward(rows: bool) -> Callable[[LocalCall], Any]:
    """The op on its share of the gradient: it divides by what it holds, not by the whole count."""

    def run(call: LocalCall) -> Any:
        x = call["self"]
        if not x.numel():
            return _nothing(call)[0]
        here, whole = _share(call, 1, x, rows)
        if here == whole or call["reduction"] != MEAN:
            return call.run()
        return call.run(grad_output=call["grad_output"] * (here / whole))

    return run


for _name in ELEMENTWISE:
    LOCAL[f"aten::{_name}"] = _forward(rows=False)
    LOCAL[f"aten::{_name}_backward"] = _backward(rows=False)
LOCAL["aten::binary_cross_entropy_with_logits"] = _forward(rows=False)
for _name in ("multi_margin_loss", "multilabel_margin_loss_forward"):
    LOCAL[f"aten::{_name}"] = _forward(rows=True)
    LOCAL[f"aten::{_name.removesuffix('_forward')}_backward"] = _backward(rows=True)


# ---- the likelihood of a class --------------------------------------------------------------------------------------

_IGNORED = -100


def _patterns(ndim: int, name: str, classes: str) -> tuple[str, str]:
    """Scores of classes (dim 1, or the only one), and what there is one of for each row."""
    dims = [classes if dim == min(1, ndim - 1) else f"{name}{dim}" for dim in range(ndim)]
    return " ".join(dims), " ".join(dim for dim in dims if dim != classes)


def nll_rule(call: Call) -> str:
    """Classes `v` need no communication: results are Partial. A mean is completed over classes `k` and rows `r`."""
    mean = call.arg("reduction") == MEAN
    classes = "k" if mean else "v"
    scores, row = _patterns(call.ndim(0), "r" if mean else "n", classes)
    kernel = [classes, *row.split()] if mean else [classes]
    result = row if call.arg("reduction") == NONE else ""
    clauses = f"{'reduce none ; ' if mean else ''}kernel {', '.join(kernel)}"
    return f"{scores}, {row}, {classes} -> {result}, ; {clauses}"


def nll_backward_rule(call: Call) -> str:
    """The gradient of each class is made where the class is."""
    scores, row = _patterns(call.ndim(1), "n", "v")
    gradient = row if call.arg("reduction") == NONE else ""
    return f"{gradient}, {scores}, {row}, v, -> {scores} ; linear 0 ; kernel v"


def _own_targets(call: LocalCall, scores: int) -> Tensor:
    """Targets among this rank's classes, counted from its first; all others are to be ignored."""
    layout, target = call.given[scores], call["target"]
    dim = min(1, len(layout.dims) - 1)
    counted = target != call["ignore_index"]
    if target.device.type == "cpu":
        wrong = target[counted & ((target < 0) | (target >= layout.shape[dim]))]
        if wrong.numel():
            raise IndexError(f"Target {wrong.flatten()[0].item()} is out of bounds.")
    own = target - layout.offset(call.at)[dim]
    return torch.where(counted & (own >= 0) & (own < call["self"].shape[dim]), own, _IGNORED)


def _picked(call: LocalCall, reduction: int) -> tuple[Tensor, Tensor]:
    """Loss and weight of the targets among this rank's classes."""
    if not call["self"].numel():
        loss, weight = _nothing(call)
        return loss, weight
    found: tuple[Tensor, Tensor] = call.run(target=_own_targets(call, 0), ignore_index=_IGNORED, reduction=reduction)
    return found


def nll(call: LocalCall, cut: Cut) -> KernelRun:
    """Each rank picks what it holds; the others' rows are zero."""
    return _picked(call, call["reduction"])
    yield


def nll_mean(call: LocalCall, cut: Cut) -> KernelRun:
    """The mean needs the weight of all targets: two numbers are summed over the ranks."""
    loss, weight = yield Reduce(torch.stack(_picked(call, SUM)))
    return loss / weight, weight


def nll_backward(call: LocalCall, cut: Cut) -> KernelRun:
    """Each rank writes the gradients of targets among its own classes."""
    if not call["self"].numel():
        return _nothing(call)[0]
    return call.run(target=_own_targets(call, 1), ignore_index=_IGNORED)
    yield


_KERNELS = {
    "v": Kernel(nll, 0, 0.0),
    "k": Kernel(nll_mean, joint=True),
    "r": Kernel(nll_mean, joint=True, anywhere=True),
}
for _name in ("nll_loss", "nll_loss2d"):
    register(f"aten::{_name}_forward", nll_rule, _KERNELS)
    register(f"aten::{_name}_backward", nll_backward_rule, {"v": Kernel(nll_backward, 0, 0.0)})
