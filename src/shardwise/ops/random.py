"""Random ops. Each draws by one of PyTorch's fills (`uniform_`, `normal_`, ...), and may compute from these numbers.

The argument `generator` of a local call is a `Draw`: it returns this rank's shard of the fill. The global tensor does
not depend on the placements, so replicas agree and nothing is communicated.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .._torch.fake_tensors import has_readable_values, is_traced
from .._torch.ops import schema_of
from ..notation import pointwise
from ..random import is_exact
from ..random.box import box_of
from ..random.triton_fill import dropout as fused_dropout
from ..sharding.recording import recorded
from .above_autograd import filling_integers_without_gradient
from .call import Args, Call
from .kernel import LocalCall
from .op import Facts, Never
from .registry import definitions_in

define = definitions_in(__name__)

Numbers = Callable[[LocalCall, Tensor | None], Tensor]
"""From a local call, and the tensor to fill if the op writes one, to the numbers drawn."""


# ---- fills ----------------------------------------------------------------------------------------------------------


def _fill(name: str, *arguments: str) -> Numbers:
    """Return code that draws by the fill of this name, with these arguments of the call."""

    def numbers(call: LocalCall, out: Tensor | None) -> Tensor:
        given = tuple(call.arguments[argument] for argument in arguments)
        return _numbers(call, name, given, out=out)

    return numbers


def _numbers(call: LocalCall, name: str, arguments: Args, **options: object) -> Tensor:
    return call["generator"].numbers(call.layouts[0], call.at, name, arguments, **options)


def _standard(name: str, *arguments: float) -> Numbers:
    """Return code that draws by the fill of this name, with fixed arguments."""
    return lambda call, out: _numbers(call, name, arguments, out=out)


def _normal(call: LocalCall, out: Tensor | None) -> Tensor:
    """Draw as `normal_`, or as `normal` with tensors, which scale and shift the numbers drawn."""
    mean, std = call["mean"], call["std"]
    shift, scale = isinstance(mean, Tensor), isinstance(std, Tensor)
    if scale:
        _require(std >= 0, "normal expects all elements of std >= 0.0")
    drawn = _numbers(call, "normal_", (0.0 if shift or scale else mean, 1.0 if scale else std), out=out)
    if scale:
        drawn = drawn.mul_(std)
    return drawn.add_(mean) if shift or scale else drawn


def _bernoulli(call: LocalCall, out: Tensor | None) -> Tensor:
    """Draw as `bernoulli` with a number, with a tensor, or with the values of its operand as probabilities."""
    chance = call.arguments.get("p")
    chance = call["self"] if chance is None else chance
    if not isinstance(chance, Tensor):
        return _numbers(call, "bernoulli_", (chance,), out=out)
    if not chance.is_floating_point():
        torch.bernoulli(torch.zeros(1, dtype=chance.dtype, device=chance.device))  # raises the error of one device
    _require((chance >= 0) & (chance <= 1), "Expected p_in >= 0 && p_in <= 1 to be true, but got false")
    dtype = torch.float64 if chance.dtype == torch.float64 else torch.float32
    return _numbers(call, "uniform_", (0.0, 1.0), dtype=dtype) < chance


def _require(condition: Tensor, message: str) -> None:
    """Raise an error unless a condition holds everywhere on this rank. On a GPU nothing is read, so nothing raised."""
    if has_readable_values(condition):
        recorded(_raise_unless, condition, message)


def _raise_unless(condition: Tensor, message: str) -> None:
    if not bool(condition.all()):
        raise RuntimeError(message)


def _random(call: LocalCall, out: Tensor | None) -> Tensor:
    """Draw integers, as `random_` and `randint_like`."""
    names = ("from", "low", "to", "high")
    return _numbers(call, "random_", tuple(call[name] for name in names if name in call.arguments), out=out)


def _writing(numbers: Numbers) -> Callable[[LocalCall], Tensor]:
    """Return the local code of an op, which draws into the tensor that the op writes, if it writes one."""

    def run(call: LocalCall) -> Tensor:
        alias = schema_of(call.func).arguments[0].alias_info
        target = call["self"] if alias is not None and alias.is_write else None
        value = numbers(call, target)
        if target is None:
            return value.to(call.dtypes[0])
        return target if value is target else target.copy_(value)

    return run


def _rule(call: Call) -> str:
    """Return an elementwise rule: the numbers drawn have the shape of the operand."""
    return pointwise(len(call.tensors))


for _name, _numbers_of in {
    "uniform": _fill("uniform_", "from", "to"),
    "normal": _normal,
    "log_normal": _fill("log_normal_", "mean", "std"),
    "exponential": _fill("exponential_", "lambd"),
    "geometric": _fill("geometric_", "p"),
    "cauchy": _fill("cauchy_", "median", "sigma"),
    "bernoulli": _bernoulli,
    "random": _random,
}.items():
    _facts: Facts = {"draw": _writing(_numbers_of)}
    if _name == "normal":
        _facts |= {"derivative_makes_tensors": True, "strides": "row-major"}
    define((f"aten::{_name}", f"aten::{_name}_"), _rule, **_facts)
define("aten::bernoulli_.Tensor", _rule, draw=_writing(_bernoulli), override=filling_integers_without_gradient)
define("aten::normal_functional", _rule, draw=_writing(_normal))
define("aten::randint_like", _rule, draw=_writing(_random))
define("aten::rand_like", _rule, draw=_writing(_standard("uniform_", 0.0, 1.0)), reads_shape_only=True)
define("aten::randn_like", _rule, draw=_writing(_standard("normal_", 0.0, 1.0)), reads_shape_only=True)


# ---- dropout --------------------------------------------------------------------------------------------------------


def dropout(call: LocalCall) -> tuple[Tensor, Tensor]:
    """Run `native_dropout` with the mask that `bernoulli_` draws: a training run may use either op."""
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


define("aten::native_dropout", "x.. -> x.., x..", draw=dropout)


# ---- decomposed -----------------------------------------------------------------------------------------------------


_DECOMPOSED = Never("other ops draw the numbers")


def multinomial(
    weights: Tensor, num_samples: int, replacement: bool = False, *, generator: torch.Generator | None = None
) -> Tensor:
    """Draw indices by their weights.

    Without replacement, as in PyTorch: those with the largest quotients of weights and exponential numbers. With
    replacement: those where uniform numbers fall in the running sum of the weights.
    """
    _check_weights(weights, num_samples, replacement)
    if not replacement or num_samples == 1:
        race = weights / torch.empty_like(weights).exponential_(1.0, generator=generator)
        return race.argmax(-1, keepdim=True) if num_samples == 1 else race.topk(num_samples, -1).indices
    if is_exact():
        return NotImplemented
    sums = weights.cumsum(-1)
    levels = sums.new_empty((*weights.shape[:-1], num_samples)).uniform_(generator=generator) * sums[..., -1:]
    return torch.searchsorted(sums, levels, right=True).clamp(max=weights.shape[-1] - 1)


def _check_weights(weights: Tensor, num_samples: int, replacement: bool) -> None:
    """Raise the errors of `multinomial` on one device, which reads the weights, too."""
    if weights.dim() not in (1, 2) or not weights.is_floating_point() or not weights.shape[-1]:
        problem = f"weights of shape {list(weights.shape)} and dtype {weights.dtype}"
        raise RuntimeError(f"multinomial expects one or two dims of a floating-point dtype, not {problem}")
    if num_samples <= 0 or not (replacement or num_samples <= weights.shape[-1]):
        how = "with" if replacement else "without"
        raise RuntimeError(f"multinomial cannot draw {num_samples} of {weights.shape[-1]} indices {how} replacement")
    valid = (weights >= 0) & (weights < torch.inf)
    if not is_traced() and not bool(valid.all(-1).logical_and(weights.sum(-1) > 0).all()):
        raise RuntimeError("multinomial expects weights that are finite and not negative, with a positive sum")


def rrelu_with_noise(
    x: Tensor,
    noise: Tensor,
    lower: float = 0.125,
    upper: float = 1.0 / 3.0,
    training: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return a leaky ReLU with a random slope for each negative element.

    PyTorch draws for these elements only, so its numbers depend on all elements: an exact draw runs on gathered inputs.
    """
    if not training:
        return torch.nn.functional.leaky_relu(x, (lower + upper) / 2).contiguous()
    if is_exact():
        return NotImplemented
    drawn = torch.empty_like(noise).uniform_(lower, upper, generator=generator)
    noise.copy_(torch.where(x <= 0, drawn, 1.0))
    return (x * noise).contiguous()


def rrelu_with_noise_(
    x: Tensor,
    noise: Tensor,
    lower: float = 0.125,
    upper: float = 1.0 / 3.0,
    training: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Run `rrelu_with_noise` in place."""
    value = rrelu_with_noise(x, noise, lower, upper, training, generator)
    return value if value is NotImplemented else x.copy_(value)


define("aten::multinomial", _DECOMPOSED, decomposition=multinomial)
define("aten::rrelu_with_noise", _DECOMPOSED, decomposition=rrelu_with_noise)
define("aten::rrelu_with_noise_", _DECOMPOSED, decomposition=rrelu_with_noise_)


# ---- on gathered inputs: rarely used, so all ranks draw the global tensor from generators in the same state ---------

define(("aten::_sample_dirichlet", "aten::_standard_gamma"), "[x..] -> _..")
define("aten::poisson", "[x..] -> _..", derivative_makes_tensors=True, strides="row-major")
define("aten::binomial", "[x..], [y..] -> _..")
