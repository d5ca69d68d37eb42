"""Variances and standard deviations: each rank's mean and squares about it are gathered and merged."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .call import Call
from .kernel import FactorShard, Gather, Kernel, KernelRun, LocalCall, Steps
from .reduce import counts, merged, over, wide
from .registry import definitions_in

define = definitions_in(__name__)


def _squared(x: Tensor) -> Tensor:
    # A lazy conjugate would never be computed: below dispatch nothing looks at the tensor's conjugate bit.
    return x * x.conj_physical() if x.is_complex() else x * x


def moments(x: Tensor, dims: list[int], everywhere: int, shard: FactorShard) -> Steps[tuple[Tensor, Tensor]]:
    """Return the global mean along `dims`, over `everywhere` elements, and the sum of squares about it; dims are kept.

    Each rank's mean and squares about its own mean are gathered and merged (Chan et al.), since a sum of
    squares about zero loses all digits where the mean is large.
    """
    here = math.prod(x.shape[dim] for dim in dims)
    shape = [1 if dim in dims else size for dim, size in enumerate(x.shape)]
    center = x.mean(dims, True) if here else x.new_zeros(shape)
    apart = x - center
    squares = _squared(apart).sum(dims, True) if here else x.new_zeros(shape)
    parts = yield Gather(torch.stack([center, squares]))
    held = [stop - start for start, stop in shard.bounds]
    weights = x.real.new_tensor([n * (everywhere // max(1, shard.size)) for n in held]).view(-1, *[1] * x.dim())
    centers, squared = parts.unbind(1)
    center = (centers * (weights / max(1, everywhere))).sum(0)
    apart = centers - center
    return center, (squared + _squared(apart) * weights).sum(0)


def _correction(call: LocalCall) -> float:
    correction = call.arguments.get("correction")
    return float(call.arguments.get("unbiased", True)) if correction is None else float(correction)


def variance(root: bool, with_mean: bool) -> Kernel:
    """Return the kernel of a variance, or of its root, the standard deviation; with the mean as a second result."""

    def run(call: LocalCall, shard: FactorShard) -> KernelRun:
        x, dims = call["self"], over(call)
        everywhere = counts(call, dims, x)[1]
        center, squares = yield from moments(x.to(wide(x.dtype)), dims, everywhere, shard)
        if everywhere == 0:
            center, squares = torch.full_like(center, math.nan), torch.full_like(squares, math.nan)
        spread = squares.real / max(0.0, everywhere - _correction(call))
        results = [spread.sqrt() if root else spread, *([center] if with_mean else [])]
        keepdim = call.arguments.get("keepdim", False)
        done = [(r if keepdim else r.squeeze(dims)).to(dtype) for r, dtype in zip(results, call.dtypes, strict=True)]
        return tuple(done) if with_mean else done[0]

    return Kernel(run, rounds=1, traffic=4.0, joint=True)


def variance_rule(results: int) -> Callable[[Call], str]:
    """Return the rule of `var` and its like, which have one or two results."""
    return lambda call: merged(call.ndim(0), call.arg("dim", None), call.arg("keepdim", False), results)


define("aten::var", variance_rule(1), kernels={"k": variance(root=False, with_mean=False)})
define("aten::std", variance_rule(1), kernels={"k": variance(root=True, with_mean=False)})
define("aten::var_mean", variance_rule(2), kernels={"k": variance(root=False, with_mean=True)})
define("aten::std_mean", variance_rule(2), kernels={"k": variance(root=True, with_mean=True)})
