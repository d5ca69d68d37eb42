"""Elementwise ops: any dim may be sharded, and operands that broadcast along a dim are replicated there.

PyTorch tags these ops, so a record is needed only for those without the tag, and for those that pass Partial operands.
These clauses are written by hand: probing with data finds wrong ones too often. A sum passes through an op that is
linear, unless the other operands may turn finite numbers into infinite ones, as a zero divisor does: the infinities of
two ranks would add up to NaN. A maximum passes through ops that move numbers, or take a maximum or minimum themselves.
Other increasing functions are not worth it: they would have to keep NaN (`sign` does not), be defined everywhere, and
stay below infinity (`x + inf` is NaN where x is -inf on one rank).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Unpack

import torch

from .._torch.ops import OpOverload, overload_name, packet_name, schema_of
from ..notation.build import pointwise, replicated_dims
from .above_autograd import filling_integers_without_gradient
from .call import Call, has_finite_numbers, numbers_of
from .op import Facts, Op
from .registry import definitions_in, registry
from .schema import FOREACH, KINDS, operands_of, overload_key, overloads

define = definitions_in(__name__)

# ---- how Partial operands pass ------------------------------------------------------------------------------------


def _define(operands: int, clauses: str, names: Iterable[str], **facts: Unpack[Facts]) -> None:
    define([f"aten::{name}" for name in names], pointwise(operands, clauses), **facts)


_define(1, "linear 0 ; monotone 0", ["positive", "zero"])
_define(1, "linear 0", ["conj_physical", "_conj_physical", "resolve_conj", "resolve_neg", "deg2rad", "rad2deg"])
_define(1, "monotone 0", ["relu", "relu6", "hardtanh"])
_define(2, "linear 0+1", ["complex"], strides="elementwise")
# A maximum passes through `maximum` in both operands together, a minimum does not. fmax and fmin drop NaNs.
_define(2, "monotone 0 | 1 | 0+1 ; reduce max", ["maximum", "clamp_min"], strides="elementwise")
_define(2, "monotone 0 | 1 | 0+1 ; reduce min", ["minimum", "clamp_max"], strides="elementwise")
_define(3, "linear 1+2 ; monotone 1+2", ["where"], strides="as run")
_define(3, "linear 0+2 ; monotone 0 | 0+2", ["masked_fill"])
_define(3, "linear 0+2 ; monotone 0 | 0+2", ["masked_fill_.Tensor"], override=filling_integers_without_gradient)
define("aten::fill_.Tensor", pointwise(2), override=filling_integers_without_gradient)
define("aten::angle", pointwise(1), strides="row-major if complex")
define(("aten::sgn", "aten::mvlgamma"), pointwise(1), derivative_makes_tensors=True)
define(("aten::copysign", "aten::nextafter"), pointwise(2), derivative_makes_tensors=True, strides="elementwise")
# Written in place, a comparison has a gradient: zeros.
define([f"aten::{name}_" for name in ("eq", "ne", "lt", "le", "gt", "ge")], pointwise(2), derivative_makes_tensors=True)


def neg(call: Call) -> str:
    """Return the rule: a maximum becomes a minimum.

    Not for integers: the negative of the least integer is itself.
    """
    return pointwise(1, "linear 0", "antitone 0" if call.tensors[0].dtype.is_floating_point else "")


def _multiplying(operands: int, linear: str) -> Callable[[Call], str]:
    """Return the rule of an op that multiplies by its number arguments: linear if these are finite."""

    def rule(call: Call) -> str:
        return pointwise(operands, linear if has_finite_numbers(call) else "")

    return rule


def div(call: Call) -> str:
    """Return the rule: division by a number other than 0 is linear, unless it rounds. A tensor may hold zeros."""
    linear = call.arg("rounding_mode", None) is None and not hasattr(call.tensors[1], "dtype")
    return pointwise(2, "linear 0" if linear and 0 not in numbers_of(call) else "")


def clamp(call: Call) -> str:
    """Return the rule: monotone in the input alone. The bounds are numbers or tensors, and either may be missing."""
    return pointwise(3, "monotone 0")


def of_gradient(call: Call) -> str:
    """Return the rule: these backward formulas multiply the gradient, their first operand, by a finite number."""
    return pointwise(len(call.tensors), "linear 0")


define("aten::neg", neg)
define(("aten::add", "aten::sub"), _multiplying(2, "linear 0+1"), strides="elementwise")
define("aten::rsub", _multiplying(2, "linear 0+1"), strides="elementwise reversed")
define("aten::mul", _multiplying(2, "linear 0 | 1"), strides="elementwise")
define("aten::addcmul", _multiplying(3, "linear 0+1 | 0+2"), strides="elementwise")
define("aten::lerp", _multiplying(3, "linear 0+1"), strides="elementwise")
define("aten::div", div, strides="elementwise")
define(("aten::clamp", "aten::clip"), clamp, strides="elementwise")
define(
    [
        f"aten::{name}_backward"
        for name in (
            *("silu", "gelu", "sigmoid", "tanh", "elu", "hardtanh", "softplus"),
            *("mish", "hardswish", "hardsigmoid", "softshrink", "hardshrink", "native_dropout"),
        )
    ],
    of_gradient,
    strides="elementwise",
)
define(("aten::threshold_backward", "aten::leaky_relu_backward"), of_gradient, strides="elementwise reversed")

# ---- ops that are elementwise in some of their dims -----------------------------------------------------------------


def isin(call: Call) -> str:
    """Return the rule: every element is compared with all test elements."""
    elements = "" if overload_name(call.op) == "Scalar_Tensor" else "x.."
    tests = "" if overload_name(call.op) == "Tensor_Scalar" else "[t..]"
    return f"{', '.join(filter(None, (elements, tests)))} -> {elements}"


def log_sigmoid_backward(call: Call) -> str:
    """Return the rule: some devices keep a buffer as large as the input, others none."""
    buffer = "x.." if call.shape(2) == call.shape(1) else "_.."
    return f"x.., x.., {buffer} -> x.. ; linear 0"


def glu(call: Call) -> str:
    """Return the rule: the dim that is halved must be replicated."""
    ndim, dim = call.ndim(0), call.arg("dim", -1)
    return f"{replicated_dims('x', ndim, dim)} -> {_halved(ndim, dim)}"


def glu_backward(call: Call) -> str:
    """Return the rule: the gradient is half as long as the input."""
    ndim, dim = call.ndim(1), call.arg("dim")
    return f"{_halved(ndim, dim)}, {replicated_dims('x', ndim, dim)} -> {replicated_dims('x', ndim, dim)} ; linear 0"


def _halved(ndim: int, dim: int) -> str:
    return " ".join("_" if d == dim % ndim else f"x{d}" for d in range(ndim))


define("aten::isin", isin, strides="row-major")
define("aten::log_sigmoid_backward", log_sigmoid_backward)
define("aten::glu", glu)
define("aten::glu_backward", glu_backward, derivative_makes_tensors=True, strides="row-major")
define(("aten::ldexp", "aten::_prelu_kernel"), pointwise(2), strides="as run")
define("aten::_prelu_kernel_backward", "b?.., b?.., b?.. -> b.., b..", strides="as run")
define("aten::rrelu_with_noise_backward", pointwise(3), strides="as run")
define("aten::pow.Scalar", "b?.. -> b..", strides="row-major")
define("aten::log_sigmoid_forward", "b?.. -> b.., b..", strides="row-major")

# ---- all others, by PyTorch's tag -----------------------------------------------------------------------------------

_UNTAGGED = (
    *("hardswish", "leaky_relu", "floor_divide", "fill", "nan_to_num", "polar", "float_power"),
    "frexp",
    *("bessel_i0", "bessel_i0e", "bessel_i1", "bessel_i1e", "cbrt", "erf_inv", "shift_left", "shift_right_arithmetic"),
)
"""Elementwise ops that PyTorch does not tag. Those of the last line exist as prims alone."""


def _base_name(func: OpOverload) -> str:
    name = packet_name(func).rpartition("::")[2].removeprefix(FOREACH)
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def _is_pointwise(func: OpOverload) -> bool:
    name = _base_name(func)
    if torch.Tag.pointwise in func.tags or name in _UNTAGGED:
        return True
    # The ops on lists have no tags, nor have most prims, which forward-mode derivatives call.
    if not packet_name(func).startswith((f"aten::{FOREACH}", "prims::")):
        return False
    models = (*overloads(f"aten::{name}"), *overloads(f"aten::special_{name}"))
    return any(torch.Tag.pointwise in model.tags for model in models)


def _by_tag(func: OpOverload) -> Op | None:
    """Return the record of an elementwise op that passes no Partial operand."""
    count = len(operands_of(func))
    results = sum(str(result.type) in KINDS for result in schema_of(func).returns) or 1
    if not count or not _is_pointwise(func):
        return None
    rule = f"{', '.join(['b?..'] * count)} -> {', '.join(['b..'] * results)}"
    return Op(overload_key(func), rule, origin="elementwise", strides="elementwise", file="ops/elementwise.py")


registry.add_pattern(_by_tag)
