"""Reductions: what a cut dim leaves on each rank is one operand of the same reduction.

Those that are not (variances, norms, arg-reductions) are completed by kernels, and so are their rules in `kernels`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..notation.build import dims_text, join, normalized, reduction, whole_dims
from .call import Call
from .tables import register_table


def reduced_dims(ndim: int, dims: int | Sequence[int] | None) -> list[int]:
    """The dims that a reduction with this argument goes over: all of them for None and for an empty list."""
    return normalized(ndim, dims) or list(range(ndim))


def merged(ndim: int, dims: int | Sequence[int] | None, keepdim: bool = False, outputs: int = 1) -> str:
    """The rule of a reduction that a kernel completes over the cut ones of these dims.

    >>> merged(3, [0, 2])
    'k0 x1 k2 -> x1 ; reduce none ; kernel k0, k2'
    """
    over = reduced_dims(ndim, dims)
    operand = dims_text("x", ndim, {dim: f"k{dim}" for dim in over})
    result = dims_text("x", ndim, dict.fromkeys(over, "1" if keepdim else ""))
    kernel = f"kernel {', '.join(f'k{dim}' for dim in over)}" if over else ""
    return join(f"{operand} -> {', '.join([result] * outputs)}".strip(), "reduce none" if over else "", kernel)


def along(ndim: int, dim: int, outputs: int, keepdim: bool | None = None) -> str:
    """The rule of an op that needs one dim whole; `keepdim` is None where its results keep that dim as it is.

    >>> along(2, 1, 2), along(2, -1, 1, False)
    ('x0 [x1] -> x0 [x1], x0 [x1]', 'x0 [x1] -> x0')
    """
    operand = whole_dims("x", ndim, dim)
    result = operand
    if keepdim is not None:
        result = dims_text("x", ndim, dict.fromkeys(normalized(ndim, dim), "1" if keepdim else ""))
    return f"{operand} -> {', '.join([result] * outputs)}"


def reduce_by(op: str, linear: bool = True) -> Callable[[Call], str]:
    """The rule of reductions by an op that Partial knows."""

    def rule(call: Call) -> str:
        # Sums of booleans are counts: they differ from the count of a sum.
        passes = linear and not (op == "sum" and call.tensors[0].dtype is torch.bool)
        return reduction(call.ndim(0), call.arg("dim", None), call.arg("keepdim", False), op, passes)

    return rule


def truth(op: str) -> Callable[[Call], str]:
    """`any` and `all`: over no dims at all they only cast."""
    reduces = reduce_by(op, linear=False)
    return lambda call: "x.. -> x.." if call.arg("dim", None) in ((), []) else reduces(call)


def min_and_max(call: Call) -> str:
    """`aminmax`: two reductions at once."""
    text = reduction(call.ndim(0), call.arg("dim"), call.arg("keepdim"), linear=False)
    operand, _, result = text.partition("->")
    return f"{operand}-> {result}, {result} ; reduce min, max"


def along_dim(outputs: int) -> Callable[[Call], str]:
    """The rule of ops that put a dim in another order."""
    return lambda call: along(call.ndim(0), call.arg("dim"), outputs)


def over_whole_dims(call: Call) -> str:
    """Reductions that Partial does not know: what they go over is whole, other dims are cut."""
    ndim, over = call.ndim(0), reduced_dims(call.ndim(0), call.arg("dim"))
    result = dims_text("x", ndim, dict.fromkeys(over, "1" if call.arg("keepdim") else ""))
    return f"{whole_dims('x', ndim, over)} -> {result}"


def picked_from_dim(call: Call) -> str:
    """Ops that look for one element of a whole dim: its value and its index."""
    return along(call.ndim(0), call.arg("dim"), 2, call.arg("keepdim"))


_ONE_WHOLE = "[x..] -> "

register_table(
    {
        "aten::sum": reduce_by("sum"),
        "aten::mean": reduce_by("sum"),  # its local part divides by the whole count
        "aten::nansum": reduce_by("sum", linear=False),
        "aten::count_nonzero": reduce_by("sum", linear=False),
        "aten::prod": reduce_by("product"),
        "aten::amax": reduce_by("max"),
        "aten::amin": reduce_by("min"),
        "aten::max.default": reduce_by("max"),
        "aten::min.default": reduce_by("min"),
        "aten::max.other": "b?.., b?.. -> b.. ; monotone 0+1 ; reduce max",
        "aten::min.other": "b?.., b?.. -> b.. ; monotone 0+1 ; reduce min",
        "aten::any": truth("max"),
        "aten::all": truth("min"),
        "aten::aminmax": min_and_max,
        "aten::hash_tensor": over_whole_dims,
        "aten::sort": along_dim(2),
        "aten::argsort": along_dim(1),
        "aten::msort": "[k] x.. -> [k] x..",
        "aten::kthvalue": picked_from_dim,
        "aten::mode": picked_from_dim,
        "aten::median.dim": picked_from_dim,
        "aten::nanmedian.dim": picked_from_dim,
        "aten::median.default": _ONE_WHOLE,
        "aten::nanmedian.default": _ONE_WHOLE,
        "aten::trace": "[a] [b] -> ; linear 0",
        # Their results depend on data, so each rank looks at everything.
        "aten::bincount": "[x..], [x..] -> _",
        "aten::_unique": "[x..] -> _, _..",
        "aten::_unique2": "[x..] -> _, _.., _..",
        "aten::unique_dim": "[x..] -> _.., _, _",
        "aten::unique_consecutive": "[x..] -> _.., _.., _",
        "aten::_local_scalar_dense": _ONE_WHOLE,
    }
)
