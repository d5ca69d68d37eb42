"""Reductions that need more than one number of each rank: means, variances, norms, and where an extreme lies."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .call import Call
from .kernel import Cut, Gather, Kernel, KernelRun, LocalCall, Reduce
from .reduce import merged, reduced_dims
from .tables import INSTEAD, LOCAL, ONLY_SUMMED, register


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which results of this dtype are added up."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def over(call: LocalCall, name: str = "dim") -> list[int]:
    """The dims that a call reduces over."""
    return reduced_dims(len(call.given[0].dims), call.arguments.get(name))


def _counts(call: LocalCall, dims: list[int], local: Tensor) -> tuple[int, int]:
    """How many elements each result is made of: here, and in all."""
    return math.prod(local.shape[dim] for dim in dims), math.prod(call.given[0].shape[dim] for dim in dims)


def mean(call: LocalCall) -> Any:
    """A mean is the sum of each rank's mean by its share of the elements: shards may be uneven."""
    x, dims = call["self"], over(call)
    here, whole = _counts(call, dims, x)
    if here == whole:
        return call.run()
    if here == 0:
        return x.new_zeros(call.local_shape(), dtype=call.dtypes[0])
    local = x.mean(dims, bool(call.arguments.get("keepdim")), dtype=wide(call.dtypes[0]))
    return local.mul_(here / whole).to(call.dtypes[0])


LOCAL["aten::mean"] = mean
ONLY_SUMMED.add("aten::mean")


# ---- variances --------------------------------------------------------------------------------------------------


def _squared(x: Tensor) -> Tensor:
    # A lazy conjugate would never be carried out: below dispatch nothing looks at its mark.
    return x * x.conj_physical() if x.is_complex() else x * x


def moments(x: Tensor, dims: list[int], whole: int, cut: Cut) -> KernelRun:
    """The mean of all elements along `dims`, `whole` of them, and the sum of squares about it; dims are kept.

    Each rank's mean and squares about its own mean are gathered and merged (Chan et al.), since a sum of
    squares about zero loses all digits where the mean is large.
    """
    here = math.prod(x.shape[dim] for dim in dims)
    shape = [1 if dim in dims else size for dim, size in enumerate(x.shape)]
    center = x.mean(dims, True) if here else x.new_zeros(shape)
    apart = x - center
    squares = _squared(apart).sum(dims, True) if here else x.new_zeros(shape)
    parts = yield Gather(torch.stack([center, squares]))
    held = [stop - start for start, stop in cut.bounds]
    counts = x.real.new_tensor([n * (whole // max(1, cut.size)) for n in held]).view(-1, *[1] * x.dim())
    centers, squared = parts.unbind(1)
    center = (centers * (counts / max(1, whole))).sum(0)
    apart = centers - center
    return center, (squared + _squared(apart) * counts).sum(0)


def _correction(call: LocalCall) -> float:
    correction = call.arguments.get("correction")
    return float(call.arguments.get("unbiased", True)) if correction is None else float(correction)


def _variance(root: bool, with_mean: bool) -> Callable[[LocalCall, Cut], KernelRun]:
    def run(call: LocalCall, cut: Cut) -> KernelRun:
        x, dims = call["self"], over(call)
        whole = _counts(call, dims, x)[1]
        center, squares = yield from moments(x.to(wide(x.dtype)), dims, whole, cut)
        spread = squares.real / max(0.0, whole - _correction(call))
        results = [spread.sqrt() if root else spread, *([center] if with_mean else [])]
        keepdim = call.arguments.get("keepdim", False)
        done = [(r if keepdim else r.squeeze(dims)).to(dtype) for r, dtype in zip(results, call.dtypes, strict=True)]
        return tuple(done) if with_mean else done[0]

    return run


def _merged(outputs: int) -> Callable[[Call], str]:
    return lambda call: merged(call.ndim(0), call.arg("dim", None), call.arg("keepdim", False), outputs)


for _name, _root, _with_mean in (
    ("var", False, False),
    ("std", True, False),
    ("var_mean", False, True),
    ("std_mean", True, True),
):
    _kernel = Kernel(_variance(_root, _with_mean), rounds=1, traffic=4.0, joint=True)
    register(f"aten::{_name}", _merged(1 + _with_mean), {"k": _kernel})


# ---- norms --------------------------------------------------------------------------------------------------------


def _order(call: LocalCall) -> float:
    for name in ("ord", "p"):
        if call.arguments.get(name) is not None:
            return float(call.arguments[name])
    return 2.0


def merge_norms(local: Tensor, order: float) -> KernelRun:
    """The norm of a vector from the norms of its parts."""
    if math.isinf(order):
        return (yield Reduce(local, "max" if order > 0 else "min"))
    if order in (0.0, 1.0):
        return (yield Reduce(local))
    powers = yield Reduce(local.square() if order == 2.0 else local.pow(order))
    return powers.sqrt() if order == 2.0 else powers.pow(1 / order)


def _part(x: Tensor, order: float, dims: list[int], keepdim: bool, result: torch.dtype) -> Tensor:
    """The norm of this rank's part, in a dtype in which norms can be added up."""
    dtype = wide(result) if not x.is_complex() else None
    shape = [1 if dim in dims else size for dim, size in enumerate(x.shape) if keepdim or dim not in dims]
    if any(x.shape[dim] == 0 for dim in dims):
        # Nothing adds nothing: 0 for positive orders, infinity where small elements count most.
        return x.new_full(shape, 0.0 if order >= 0 else math.inf, dtype=wide(result))
    return torch.linalg.vector_norm(x, order, dims, keepdim, dtype=dtype).to(wide(result))


def _norm(call: LocalCall, cut: Cut) -> KernelRun:
    x, order = call["self"], _order(call)
    local = _part(x, order, over(call), bool(call.arguments.get("keepdim")), call.dtypes[0])
    return (yield from merge_norms(local, order)).to(call.dtypes[0])


def _distance(call: LocalCall, cut: Cut) -> KernelRun:
    apart, order = call["self"] - call["other"], _order(call)
    local = _part(apart, order, list(range(apart.dim())), False, call.dtypes[0])
    return (yield from merge_norms(local, order)).to(call.dtypes[0])


def distance(call: Call) -> str:
    """The norm of a difference, of tensors that may broadcast."""
    ndim = max(call.ndim(0), call.ndim(1))
    dims = [f"k{dim}" for dim in range(ndim)]
    sides = [" ".join(f"{dim}?" for dim in dims[ndim - call.ndim(i) :]) for i in (0, 1)]
    return f"{', '.join(sides)} -> ; reduce none" + (f" ; kernel {', '.join(dims)}" if dims else "")


register("aten::linalg_vector_norm", _merged(1), {"k": Kernel(_norm, joint=True)})
register("aten::norm", _merged(1), {"k": Kernel(_norm, joint=True)})
register("aten::dist", distance, {"k": Kernel(_distance, joint=True)})


# ---- one answer for all -------------------------------------------------------------------------------------------


def equal(one: Any, other: Any) -> bool:
    """Whether all elements are equal: one bit of each rank is exchanged, not the tensors."""
    return one.shape == other.shape and bool((one == other).all().item())


def close(one: Any, other: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> bool:
    """The same up to a tolerance."""
    return bool(torch.isclose(one, other, rtol, atol, equal_nan).all().item())


INSTEAD["aten::equal.default"] = equal
for _name in ("is_same_size", "_has_same_storage_numel"):
    INSTEAD[f"aten::{_name}.default"] = lambda one, other: one.shape == other.shape
INSTEAD["aten::allclose.default"] = close
