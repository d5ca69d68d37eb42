"""Random ops on a rank's part. Each is a fill of PyTorch's (`uniform_`, `normal_`, ...) and what is done with it.

The argument `generator` of a local call is a `Draw`: it gives this rank's part of the fill, the same whole tensor
whatever the placements. Replicas agree, and nothing is communicated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..notation import pointwise
from ..random import is_exact
from ..random.box import box_of
from ..random.triton_fill import dropout as fused_dropout
from .call import Call
from .kernel import LocalCall
from .tables import DRAWS, INSTEAD, register

Numbers = Callable[[LocalCall, Tensor | None], Tensor]


def _fill(name: str, *arguments: str) -> Numbers:
    """The fill of this name with the call's arguments of these names, or numbers in their place."""

    def numbers(call: LocalCall, out: Tensor | None) -> Tensor:
        given = tuple(call.arguments[argument] for argument in arguments)
        return _numbers(call, name, given, out=out)

    return numbers


def _numbers(call: LocalCall, name: str, arguments: tuple[Any, ...], **options: Any) -> Tensor:
    return call["generator"].numbers(call.layouts[0], call.at, name, arguments, **options)


def _standard(name: str, *arguments: float) -> Numbers:
    return lambda call, out: _numbers(call, name, arguments, out=out)


def _normal(call: LocalCall, out: Tensor | None) -> Tensor:
    """`normal_`, and `normal` with tensors, which scale and shift what is drawn."""
    mean, std = call["mean"], call["std"]
    shift, scale = isinstance(mean, Tensor), isinstance(std, Tensor)
    drawn = _numbers(call, "normal_", (0.0 if shift or scale else mean, 1.0 if scale else std), out=out)
    if scale:
        drawn = drawn.mul_(std)
    return drawn.add_(mean) if shift or scale else drawn


def _bernoulli(call: LocalCall, out: Tensor | None) -> Tensor:
    """`bernoulli` with a number, with a tensor, or with its own values as probabilities."""
    chance = call.arguments.get("p")
    chance = call["self"] if chance is None else chance
    if not isinstance(chance, Tensor):
        return _numbers(call, "bernoulli_", (chance,), out=out)
    dtype = torch.float64 if chance.dtype == torch.float64 else torch.float32
    return _numbers(call, "uniform_", (0.0, 1.0), dtype=dtype) < chance


def _random(call: LocalCall, out: Tensor | None) -> Tensor:
    """`random_` and `randint_like`: whole numbers."""
    names = ("from", "low", "to", "high")
    return _numbers(call, "random_", tuple(call[name] for name in names if name in call.arguments), out=out)


def _writing(numbers: Numbers) -> Callable[[LocalCall], Any]:
    """The numbers, in the place that the op writes if it writes one."""

    def run(call: LocalCall) -> Any:
        alias = call.func._schema.arguments[0].alias_info
        target = call["self"] if alias is not None and alias.is_write else None
        value = numbers(call, target)
        if target is None:
            return value.to(call.dtypes[0])
        return target if value is target else target.copy_(value)

    return run


def _rule(call: Call) -> str:
    return pointwise(len(call.tensors))


_DRAWN: dict[str, Numbers] = {
    "uniform": _fill("uniform_", "from", "to"),
    "normal": _normal,
    "normal_functional": _normal,
    "log_normal": _fill("log_normal_", "mean", "std"),
    "exponential": _fill("exponential_", "lambd"),
    "geometric": _fill("geometric_", "p"),
    "cauchy": _fill("cauchy_", "median", "sigma"),
    "bernoulli": _bernoulli,
    "random": _random,
    "randint_like": _random,
    "rand_like": _standard("uniform_", 0.0, 1.0),
    "randn_like": _standard("normal_", 0.0, 1.0),
}
for _name, _of_call in _DRAWN.items():
    for _suffix in ("", "_"):
        if hasattr(torch.ops.aten, _name + _suffix):
            register(f"aten::{_name}{_suffix}", _rule)
            DRAWS[f"aten::{_name}{_suffix}"] = _writing(_of_call)


# ---- dropout --------------------------------------------------------------------------------------------------------


def dropout(call: LocalCall) -> tuple[Tensor, Tensor]:
    """`native_dropout`, with the mask that `bernoulli_` draws: training sees the one or the other."""
    tensor, chance = call["input"], call["p"]
    if call["train"] is False or chance == 0:
        return tensor.clone(), torch.ones_like(tensor, dtype=torch.bool)
    draw = call["generator"]
    if draw.key is not None and chance < 1:
        fused = fused_dropout(tensor, box_of(call.layouts[0], call.at), draw.key, chance)
        if fused is not None:
            return fused
    kept = _numbers(call, "native_dropout", (chance,), dtype=torch.bool)
    scale = 0.0 if chance == 1 else 1.0 / (1.0 - chance)
    return tensor * kept * scale, kept


register("aten::native_dropout", "x.. -> x.., x..")
DRAWS["aten::native_dropout"] = dropout


# ---- by other ops ---------------------------------------------------------------------------------------------------


def _by_others(call: Call) -> None:
    return None


def multinomial(
    weights: Tensor, num_samples: int, replacement: bool = False, *, generator: torch.Generator | None = None
) -> Any:
    """Without replacement as plain torch: the largest of weights over exponential numbers. Else by the running sum."""
    if not replacement or num_samples == 1:
        race = weights / torch.empty_like(weights).exponential_(1.0, generator=generator)
        return race.argmax(-1, keepdim=True) if num_samples == 1 else race.topk(num_samples, -1).indices
    if is_exact():
        return NotImplemented
    sums = weights.cumsum(-1)
    levels = sums.new_empty((*weights.shape[:-1], num_samples)).uniform_(generator=generator) * sums[..., -1:]
    return torch.searchsorted(sums, levels, right=True).clamp(max=weights.shape[-1] - 1)


def rrelu_with_noise(
    x: Tensor,
    noise: Tensor,
    lower: float = 0.125,
    upper: float = 1.0 / 3.0,
    training: bool = False,
    generator: torch.Generator | None = None,
) -> Any:
    """A slope drawn for each negative element. PyTorch draws for these alone, so that an exact draw needs the whole."""
    if not training:
        return torch.nn.functional.leaky_relu(x, (lower + upper) / 2)
    if is_exact():
        return NotImplemented
    drawn = torch.empty_like(noise).uniform_(lower, upper, generator=generator)
    noise.copy_(torch.where(x <= 0, drawn, 1.0))
    return x * noise


def rrelu_with_noise_(x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The same, in place."""
    value = rrelu_with_noise(x, *args, **kwargs)
    return value if value is NotImplemented else x.copy_(value)


_INSTEAD: dict[str, Callable[..., Any]] = {
    "multinomial": multinomial,
    "rrelu_with_noise": rrelu_with_noise,
    "rrelu_with_noise_": rrelu_with_noise_,
}
for _name, _by in _INSTEAD.items():
    register(f"aten::{_name}.default", _by_others)
    INSTEAD[f"aten::{_name}.default"] = _by

# Few, and not worth an algorithm of their own: all ranks draw the whole from generators in the same state.
for _name in ("poisson", "_sample_dirichlet", "_standard_gamma"):
    register(f"aten::{_name}", "[x..] -> _..")
register("aten::binomial", "[x..], [y..] -> _..")
