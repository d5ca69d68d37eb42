"""Elementwise ops: any dim may be cut, operands that broadcast are replicated along it.

PyTorch tags them, so only those it forgot are listed. What is listed for the others is how Partial operands pass; by
hand, since tests on data are fooled too often.
"""

from __future__ import annotations

import torch
from torch._ops import OpOverload

from .build import pointwise
from .registry import Call, registry
from .schema import FOREACH, operands_of, packet_name

# How Partial operands pass through ops that carry the tag.
PASSING = {
    "add": "linear 0+1",
    "sub": "linear 0+1",
    "rsub": "linear 0+1",
    "mul": "linear 0 | 1",
    "neg": "linear 0 ; antitone 0",
    "positive": "linear 0 ; monotone 0",
    "clone": "linear 0 ; monotone 0",
    "deg2rad": "linear 0 ; monotone 0",
    "rad2deg": "linear 0 ; monotone 0",
    "conj_physical": "linear 0",
    "where": "linear 1+2",
    "maximum": "monotone 0+1",
    "minimum": "monotone 0+1",
    "relu": "monotone 0",
    "floor": "monotone 0",
    "ceil": "monotone 0",
    "trunc": "monotone 0",
    "round": "monotone 0",
    "exp": "monotone 0",
    "sigmoid": "monotone 0",
    "tanh": "monotone 0",
    "erf": "monotone 0",
    "atan": "monotone 0",
    "threshold_backward": "linear 0",
    "silu_backward": "linear 0",
    "gelu_backward": "linear 0",
    "sigmoid_backward": "linear 0",
    "tanh_backward": "linear 0",
    "elu_backward": "linear 0",
    "leaky_relu_backward": "linear 0",
    "hardtanh_backward": "linear 0",
    "logit_backward": "linear 0",
    "softplus_backward": "linear 0",
    "mish_backward": "linear 0",
}

# Elementwise ops without the tag.
UNTAGGED = (
    "hardswish hardswish_backward log_sigmoid_forward log_sigmoid_backward hardsigmoid_backward glu_jvp "
    "softshrink_backward hardshrink_backward hardtanh_backward elu_backward leaky_relu_backward "
    "logit_backward softplus_backward mish_backward silu_backward gelu_backward threshold_backward "
    "complex polar floor_divide rsub copysign isin masked_fill lerp fill zero"
).split()


def _base_name(func: OpOverload) -> str:
    name = packet_name(func).rpartition("::")[2].removeprefix(FOREACH)
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def _generic(func: OpOverload) -> str | None:
    name = _base_name(func)
    if torch.Tag.pointwise not in func.tags and name not in UNTAGGED:
        return None
    count = len(operands_of(func))
    passing = PASSING.get(name, "")
    if func._schema.name.startswith("aten::div"):
        passing = ""
    return pointwise(count, passing) if count else None


def div(call: Call) -> str:
    """Division is linear in the dividend, unless it rounds."""
    return pointwise(2, "" if call.arg("rounding_mode", None) else "linear 0")


registry.register("aten::div", div)
registry.add_generic(_generic)
