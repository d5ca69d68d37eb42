"""Random numbers on a rank's part: each depends on the call's key and its global index, on nothing else.

A dropout mask, a fill, a sample is thus the same whole tensor whatever its placements, and replicas agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..random import integers, normal, uniform
from ..rules import Call, pointwise, register
from . import DRAWS
from .requests import LocalCall

Draw = Callable[[LocalCall], Tensor]
_WIDE = (torch.float32, torch.float64)


def _like(call: LocalCall) -> Tensor:
    return next(value for value in call.arguments.values() if isinstance(value, Tensor))


def _uniform(call: LocalCall, dtype: torch.dtype | None = None) -> Tensor:
    return uniform(call.layouts[0], call.at, call["generator"], dtype or call.dtypes[0], _like(call).device)


def _wide(call: LocalCall) -> torch.dtype:
    """The dtype to compute in: narrow ones would round a uniform number to 1."""
    return call.dtypes[0] if call.dtypes[0] in _WIDE else torch.float32


def _normal(call: LocalCall) -> Tensor:
    return normal(call.layouts[0], call.at, call["generator"], call.dtypes[0], _like(call).device)


def _log_uniform(call: LocalCall) -> Tensor:
    """Logarithms of numbers in (0, 1]."""
    return torch.log1p(-_uniform(call, _wide(call)))


# ---- the distributions --------------------------------------------------------------------------------------------


def uniform_between(call: LocalCall) -> Tensor:
    """`uniform_`."""
    low, high = call["from"], call["to"]
    return _uniform(call).mul_(high - low).add_(low)


def normal_with(call: LocalCall) -> Tensor:
    """`normal_` and `normal`, with numbers or tensors."""
    return _normal(call).mul_(call["std"]).add_(call["mean"])


def log_normal(call: LocalCall) -> Tensor:
    """`log_normal_`."""
    return normal_with(call).exp_()


def exponential(call: LocalCall) -> Tensor:
    """`exponential_`."""
    return _log_uniform(call).div_(-call["lambd"])


def geometric(call: LocalCall) -> Tensor:
    """`geometric_`: how many trials it takes."""
    return _log_uniform(call).div_(math.log1p(-call["p"])).ceil_().clamp_(min=1)


def cauchy(call: LocalCall) -> Tensor:
    """`cauchy_`."""
    angle = _uniform(call, _wide(call)).sub_(0.5).mul_(math.pi)
    return angle.tan_().mul_(call["sigma"]).add_(call["median"])


def bernoulli(call: LocalCall) -> Tensor:
    """`bernoulli` with a number, with a tensor, or with its own values as probabilities."""
    chance = call.arguments.get("p")
    return (_uniform(call, torch.float32) < (call["self"] if chance is None else chance)).to(call.dtypes[0])


def random(call: LocalCall) -> Tensor:
    """`random_` and `randint_like`: whole numbers."""
    dtype = call.dtypes[0]
    low, high = call.arguments.get("from", call.arguments.get("low", 0)), call.arguments.get("to")
    high = call.arguments.get("high", high)
    if high is None:
        high = 2 ** round(-math.log2(torch.finfo(dtype).eps) + 1) + 1 if dtype.is_floating_point else _most(dtype)
    return integers(call.layouts[0], call.at, call["generator"], int(low or 0), int(high), _like(call).device)


def _most(dtype: torch.dtype) -> int:
    return 2 if dtype is torch.bool else min(torch.iinfo(dtype).max + 1, 2**63 - 1)


# ---- registering ----------------------------------------------------------------------------------------------------


def _writing(draw: Draw) -> Callable[[LocalCall], Any]:
    """The numbers, in the place that the op writes if it writes one."""

    def run(call: LocalCall) -> Any:
        value = draw(call).to(call.dtypes[0])
        alias = call.func._schema.arguments[0].alias_info
        return call["self"].copy_(value) if alias is not None and alias.is_write else value

    return run


def _rule(call: Call) -> str:
    return pointwise(len(call.tensors))


_DRAWN: dict[str, Draw] = {
    "uniform": uniform_between,
    "normal": normal_with,
    "normal_functional": normal_with,
    "log_normal": log_normal,
    "exponential": exponential,
    "geometric": geometric,
    "cauchy": cauchy,
    "bernoulli": bernoulli,
    "random": random,
    "randint_like": random,
    "rand_like": _uniform,
    "randn_like": _normal,
}
for _name, _draw in _DRAWN.items():
    for _suffix in ("", "_"):
        if hasattr(torch.ops.aten, _name + _suffix):
            register(f"aten::{_name}{_suffix}", _rule)
            DRAWS[f"aten::{_name}{_suffix}"] = _writing(_draw)


def dropout(call: LocalCall) -> tuple[Tensor, Tensor]:
    """`native_dropout`, with the mask that `bernoulli_` draws: training sees the one or the other."""
    tensor, chance = call["input"], call["p"]
    if call["train"] is False or chance == 0:
        return tensor.clone(), torch.ones_like(tensor, dtype=torch.bool)
    kept = _uniform(call, torch.float32) < 1.0 - chance
    scale = 0.0 if chance == 1 else 1.0 / (1.0 - chance)
    return tensor * kept * scale, kept


register("aten::native_dropout", "x.. -> x.., x..")
DRAWS["aten::native_dropout"] = dropout

# Few, and not worth an algorithm of their own: all ranks draw the whole from generators in the same state.
for _name in ("poisson", "multinomial", "_sample_dirichlet", "_standard_gamma"):
    register(f"aten::{_name}", "[x..] -> _..")
register("aten::binomial", "[x..], [y..] -> _..")
