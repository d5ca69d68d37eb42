"""Elementwise ops: any dim may be cut, operands that broadcast are replicated along it.

PyTorch tags them, so only those it forgot are listed. What is listed for the others is how Partial operands pass; by
hand, since tests on data are fooled too often. A sum passes through what is linear; a maximum through what never
decreases, for every value of its other arguments, and is nowhere undefined (so not through a logarithm).
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from .._torch.ops import OpOverload
from ..notation.build import pointwise, whole_dims
from ..notation.schema import FOREACH, KINDS, operands_of, overload_key, overloads, packet_name
from .call import Call
from .op import Op
from .registry import registry
from .tables import register, register_table

# Of two operands or more, by the number of operands. A maximum passes through `maximum` in both operands together,
# a minimum does not.
_PASSING = {
    2: {
        "add": "linear 0+1 ; monotone 0",
        "sub": "linear 0+1 ; monotone 0",
        "rsub": "linear 0+1",
        "mul": "linear 0 | 1",
        "complex": "linear 0+1",
        "maximum": "monotone 0 | 1 | 0+1 ; reduce max",
        "minimum": "monotone 0 | 1 | 0+1 ; reduce min",
        "fmax": "monotone 0 | 1 | 0+1 ; reduce max",
        "fmin": "monotone 0 | 1 | 0+1 ; reduce min",
        "clamp_min": "monotone 0 | 1 | 0+1 ; reduce max",
        "clamp_max": "monotone 0 | 1 | 0+1 ; reduce min",
    },
    3: {
        "where": "linear 1+2 ; monotone 1+2",
        "masked_fill": "linear 0+2 ; monotone 0 | 0+2",
        "lerp": "linear 0+1",
        "addcmul": "linear 0+1 | 0+2",
        "addcdiv": "linear 0+1",
    },
}

# Of one operand.
_LINEAR = "linear 0"
_MONOTONE = "monotone 0"
_SAME = "linear 0 ; monotone 0"
_ONE = {
    "neg": "linear 0 ; antitone 0",
    **dict.fromkeys(("positive", "deg2rad", "rad2deg", "zero"), _SAME),
    **dict.fromkeys(("conj_physical", "_conj", "_conj_physical", "_neg_view", "resolve_conj", "resolve_neg"), _LINEAR),
    **dict.fromkeys(
        ("relu", "relu6", "floor", "ceil", "trunc", "round", "exp", "exp2", "expm1", "sigmoid", "tanh", "erf", "atan"),
        _MONOTONE,
    ),
    **dict.fromkeys(("sinh", "asinh", "sign", "hardtanh", "hardsigmoid"), _MONOTONE),
}

# Backward formulas: linear in the gradient, which comes first.
_BACKWARD = [
    "threshold",
    "silu",
    "gelu",
    "sigmoid",
    "tanh",
    "elu",
    "leaky_relu",
    "hardtanh",
    "logit",
    "softplus",
    "mish",
    "hardswish",
    "hardsigmoid",
    "softshrink",
    "hardshrink",
    "native_dropout",
]

# Elementwise ops without the tag.
_UNTAGGED = [
    "hardswish",
    "leaky_relu",
    "floor_divide",
    "copysign",
    "fill",
    "nan_to_num",
    "polar",
    "sgn",
    "float_power",
    "_prelu_kernel",
    "_prelu_kernel_backward",
    "log_sigmoid_forward",
    "frexp",
    "rrelu_with_noise_backward",
]


def _passing(operands: int, clauses: str) -> Callable[[Call], str]:
    members = sorted({int(digit) for digit in re.findall(r"\d", clauses)})

    def rule(call: Call) -> str:
        dtypes = {t.dtype for i in members if (t := call.tensors[i]) is not None and hasattr(t, "dtype")}
        passes = _exact(dtypes) and not ("antitone" in clauses and any(not d.is_signed for d in dtypes))
        return pointwise(operands, clauses if passes else _reductions(clauses))

    return rule


def _exact(dtypes: set[torch.dtype]) -> bool:
    """Whether what the operands are summed in is what the op computes in.

    Bools have no sum, and integers may wrap around before they are cast to something wider.
    """
    wide = {dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex}
    return dtypes == wide or (len(dtypes) == 1 and torch.bool not in dtypes)


def _reductions(clauses: str) -> str:
    return " ; ".join(clause for clause in clauses.split(" ; ") if clause.startswith("reduce"))


for _operands, _table in _PASSING.items():
    for _name, _clauses in _table.items():
        register(f"aten::{_name}", _passing(_operands, _clauses))
for _name, _clauses in _ONE.items():
    register(f"aten::{_name}", _passing(1, _clauses))


def _of_gradient(call: Call) -> str:
    return pointwise(len(call.tensors), "linear 0")


for _name in _BACKWARD:
    register(f"aten::{_name}_backward", _of_gradient)


def div(call: Call) -> str:
    """Division is linear in the dividend, unless it rounds."""
    rounds = call.arg("rounding_mode", None) is not None
    return pointwise(2, "linear 0" if not rounds and _exact({call.tensors[0].dtype}) else "")


def clamp(call: Call) -> str:
    """Numbers or tensors as bounds, either of which may be missing."""
    return pointwise(3, "monotone 0")


def isin(call: Call) -> str:
    """Every element is compared with all test elements."""
    elements = "" if call.op._overloadname == "Scalar_Tensor" else "x.."
    tests = "" if call.op._overloadname == "Tensor_Scalar" else "[t..]"
    return f"{', '.join(filter(None, (elements, tests)))} -> {elements}"


def log_sigmoid_backward(call: Call) -> str:
    """Some devices keep a buffer as large as the input, others none."""
    buffer = "x.." if call.shape(2) == call.shape(1) else "_.."
    return f"x.., x.., {buffer} -> x.. ; linear 0"


def glu(call: Call) -> str:
    """The two halves of a dim belong together."""
    ndim, dim = call.ndim(0), call.arg("dim", -1)
    return f"{whole_dims('x', ndim, dim)} -> {_halved(ndim, dim)}"


def glu_backward(call: Call) -> str:
    """The gradient is half as long as the input."""
    ndim, dim = call.ndim(1), call.arg("dim")
    return f"{_halved(ndim, dim)}, {whole_dims('x', ndim, dim)} -> {whole_dims('x', ndim, dim)} ; linear 0"


def _halved(ndim: int, dim: int) -> str:
    return " ".join("_" if d == dim % ndim else f"x{d}" for d in range(ndim))


def _base_name(func: OpOverload) -> str:
    name = packet_name(func).rpartition("::")[2].removeprefix(FOREACH)
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def _is_pointwise(func: OpOverload) -> bool:
    name = _base_name(func)
    if torch.Tag.pointwise in func.tags or name in _UNTAGGED:
        return True
    # The ops on lists carry no tags.
    of_one = overloads(f"aten::{name}") if packet_name(func).startswith(f"aten::{FOREACH}") else ()
    return any(torch.Tag.pointwise in model.tags for model in of_one)


def _by_tag(func: OpOverload) -> Op | None:
    count = len(operands_of(func))
    results = sum(str(result.type) in KINDS for result in func._schema.returns) or 1
    if not count or not _is_pointwise(func):
        return None
    rule = f"{', '.join(['b?..'] * count)} -> {', '.join(['b..'] * results)}"
    return Op(overload_key(func), rule, origin="elementwise", file="ops/elementwise.py")


register_table(
    {
        "aten::div": div,
        "aten::clamp": clamp,
        "aten::clip": clamp,
        "aten::isin": isin,
        "aten::log_sigmoid_backward": log_sigmoid_backward,
        "aten::glu": glu,
        "aten::glu_backward": glu_backward,
        "aten::equal": lambda call: "[x..], [y..] -> ",
    }
)
registry.add_pattern(_by_tag)
