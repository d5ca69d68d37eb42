"""Rounding errors on purpose: run the plain program with every inexact result off by a few units in the last place.

Sums in another order round differently, and a program may amplify that: `x - x.mean()`, `floor`, a comparison. A result
that changes under noise is defined by rounding, and is not compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..._torch import pytree
from ..._torch.modes import TorchDispatchMode
from ..._torch.ops import OpOverload
from ...dispatch.arguments import Args, Kwargs
from ...sharding.placement import P, Partial, Placements
from .outcome import Outcome, plain_value, run
from .program import Program
from .sides import Plain
from .statements.table import words

RUNS = 3
NANS = (math.nan, -math.nan)
"""The sign of a NaN is not defined: in the first runs all have the same."""
UNITS = 4.0
EXACT = words("""
    abs amax amin argmax argmin as_strided bernoulli cat ceil clamp clamp_max clamp_min clone copy detach empty
    empty_like expand eye fill flip floor full full_like gather index index_copy index_fill index_put
    index_select masked_fill masked_scatter max maximum min minimum ne neg new_empty new_full new_zeros ones
    ones_like rand_like randn_like relu round scatter select_backward select_scatter set sign slice_backward
    slice_scatter sort stack take threshold_backward topk tril triu trunc unfold_backward where zero zeros
    zeros_like _to_copy rand randn uniform random normal fmax fmin roll repeat constant_pad_nd lift_fresh cummax
    cummin mode median _unsafe_view resize _local_scalar_dense
""")

SUMS = words("""
    mm bmm addmm baddbmm addbmm addmv addr mv dot vdot sum nansum mean linalg_vector_norm convolution
    convolution_backward var var_mean std std_mean cumsum logsumexp logcumsumexp trace addcmul addcdiv lerp
    native_batch_norm native_layer_norm native_group_norm native_batch_norm_backward native_layer_norm_backward
    native_group_norm_backward _native_batch_norm_legit _softmax_backward_data _log_softmax_backward_data _trilinear
""")
"""Ops that add terms. If the terms cancel, the result is rounding error alone."""
PRODUCTS = words("""
    mul mm bmm addmm baddbmm addbmm addmv addr mv dot vdot addcmul lerp convolution convolution_backward _trilinear
""")
"""Ops that multiply. An infinite operand makes the terms of a Partial sum infinite, with either sign."""
ORDERED = words("mm bmm mv dot vdot sum nansum mean cumsum _trilinear")
"""Sums that may overflow in one order of their terms, and not in another."""
INFINITE_MEANS = (math.nan, math.inf)
"""Means of numbers with an infinity among them, where they are summed in one pass with the variance: `[inf, 1]` gives
NaN, `[1, inf]` infinity. In each run all are the same."""
CANCELLED = 8.0  # times the rounding error: smaller results may as well be zero, or have the other sign
LEFT = (1.0, -1.0, 0.0)
"""The result of terms that cancel, in units of the rounding error: each run uses another one."""


class Noise(TorchDispatchMode):
    """Changes the floating-point results of inexact ops in their last digits."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed, self.generator = seed, torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        """Run an op and change its results."""
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__.rstrip("_")
        other = self._with_other_operands(func, args, kwargs) if name in SUMS else None
        overflows = _overflows(func, name, args, kwargs)
        if name == "_efficientzerotensor":  # as distributed tensors have it: zeros in memory, which a sum looks like
            func = torch.ops.aten.zeros.default
        if name == "bernoulli" and self.seed == 0 and _is_almost_one(args[0]):
            raise RuntimeError("a probability may be above 1, but for rounding")
        result = self._shuffled_topk(func, *args, **kwargs) if name == "topk" else func(*args, **kwargs)
        if other is not None:
            for x, y in zip(pytree.tree_leaves(result), pytree.tree_leaves(other), strict=True):
                if isinstance(x, Tensor):
                    self._cancel(x, y)
        if overflows is not None:
            result.masked_fill_(overflows, (math.nan, math.inf, 0.0)[self.seed % 3])
        if name in ("var_mean", "std_mean") and self.seed < len(INFINITE_MEANS):
            result[1].masked_fill_(_has_infinity(func, *args, **kwargs), INFINITE_MEANS[self.seed])
        if name == "_scaled_dot_product_flash_attention_for_cpu" and self.seed == 0:
            result[0].masked_fill_(_attention_by_formula(*args, **kwargs).isnan(), math.nan)
        if name in PRODUCTS and self.seed == 0:
            pytree.tree_map_only(Tensor, _infinite_is_nan, result)
        if not func.is_view:
            pytree.tree_map_only(Tensor, self._sign_nans if name in EXACT else self._disturb, result)
        return result

    def _shuffled_topk(
        self, topk: OpOverload, x: Tensor, k: int, dim: int = -1, *args: object, **kwargs: object
    ) -> Any:
        """Run `topk` on numbers in another order: which ones of equal numbers it chooses is not defined."""
        if not x.dim():
            return topk(x, k, dim, *args, **kwargs)
        order = torch.randperm(x.shape[dim], generator=self.generator)
        values, indices = topk(x.index_select(dim, order), k, dim, *args, **kwargs)
        return values, order[indices]

    def _with_other_operands(self, func: OpOverload, args: Args, kwargs: Kwargs) -> object:
        """Run an op on copies of its operands that are off in their last digits: so are the terms it adds."""
        args, kwargs = pytree.tree_map_only(Tensor, lambda x: self._disturb(x.clone()), (args, kwargs))
        return func(*args, **kwargs)

    def _cancel(self, x: Tensor, other: Tensor) -> None:
        """Replace sums that cancel: a sum that is zero in one order is almost zero in another, of either sign."""
        if (x.dtype.is_floating_point or x.dtype.is_complex) and x.numel() and _is_writable(x):
            error = (x - other).abs()
            cancelled = x.abs() <= CANCELLED * error
            x.copy_(torch.where(cancelled, error * LEFT[self.seed % len(LEFT)], x))

    def _disturb(self, x: Tensor) -> Tensor:
        # Zeros that autograd makes for derivatives known to be zero have elements, but no memory.
        if (x.dtype.is_floating_point or x.dtype.is_complex) and x.numel() and x.data_ptr():
            noise = torch.randn(x.shape, generator=self.generator) * (UNITS * torch.finfo(x.dtype).eps)
            if _is_writable(x):
                x.mul_((1 + noise.double()).to(x.dtype) if not x.dtype.is_complex else 1 + noise)
        return self._sign_nans(x)

    def _sign_nans(self, x: Tensor) -> Tensor:
        if x.dtype.is_floating_point and self.seed < len(NANS) and x.numel() and x.data_ptr() and _is_writable(x):
            x.masked_fill_(x.isnan(), NANS[self.seed])
        return x


def _is_writable(x: Tensor) -> bool:
    """Return whether each element has memory of its own."""
    return all(stride or size == 1 for size, stride in zip(x.shape, x.stride(), strict=True))


def _is_almost_one(x: Tensor) -> bool:
    """Return whether some number is 1, up to rounding: with another rounding it may be above."""
    return x.is_floating_point() and bool(((x - 1).abs() < 2 * UNITS * torch.finfo(x.dtype).eps).any())


def _infinite_is_nan(x: Tensor) -> Tensor:
    if x.dtype.is_floating_point and x.numel() and _is_writable(x):
        x.masked_fill_(x.isinf(), math.nan)
    return x


def _has_infinity(func: OpOverload, x: Tensor, *args: object, **kwargs: object) -> Tensor:
    """Return which means of `var_mean` are of numbers with an infinity, and without NaN, among them."""
    infinite, nan = (func(found.to(torch.float32), *args, **kwargs)[1] for found in (x.isinf(), x.isnan()))
    return (infinite > 0) & (nan == 0)


def _attention_by_formula(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return attention computed by its formula: the fused op drops NaNs of its scores, depending on their place."""
    result: Tensor = torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale
    )[0]
    return result


def _overflows(func: OpOverload, name: str, args: Args, kwargs: Kwargs) -> Tensor | None:
    """Return which results overflow or vanish on the way if their terms or factors come in the worst order.

    In float16 `60000 + 60000 - 60000` is infinite, `300 * 300 * 0` is NaN, and neither is in another order.
    """
    made = kwargs.get("dtype") or args[0].dtype if args and isinstance(args[0], Tensor) else None
    if name not in (*ORDERED, "prod") or made is None or not made.is_floating_point:
        return None
    sizes = pytree.tree_map_only(Tensor, lambda x: x.detach().double().abs().nan_to_num(1.0, 1.0), list(args))
    if name in ORDERED:
        return func(*sizes) > torch.finfo(made).max
    factors, *dims = sizes
    most = func(factors.clamp(min=1.0), *dims)
    least = func(factors.masked_fill(factors == 0, 1.0).clamp(max=1.0), *dims)
    return (most > torch.finfo(made).max) | (least < torch.finfo(made).tiny)


class NoisyPlain(Plain):
    """Plain tensors with the noise that distributed ones get where they are terms of a sum, an average or a product.

    Terms that cancel give a positive zero, and a product with zero has the sign of its factors, so the sign of a zero
    is lost as well.
    """

    def __init__(self, seed: int) -> None:
        self._zero = -0.0 if seed else 0.0

    def leaf(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        placements: Placements,
        seed: int,
        grad: bool = False,
        special: bool = False,
    ) -> Tensor:
        """Return a tensor with random values, whose zeros have one sign if it stands for several terms."""
        made = super().leaf(shape, dtype, placements, seed, special=special)
        if _is_partial(placements) and (dtype.is_floating_point or dtype.is_complex):
            parts = torch.view_as_real(made) if dtype.is_complex else made
            parts.masked_fill_(parts == 0, self._zero)
        return made.requires_grad_(grad)

    def move(self, x: Tensor, placements: Placements) -> Tensor:
        """Return a copy, which noise changes if it stands for several terms."""
        copy = super().move(x, placements)
        return copy + 0.0 if _is_partial(placements) and (copy.is_floating_point() or copy.is_complex()) else copy


def _is_partial(placements: Placements) -> bool:
    if isinstance(placements, P):
        return bool(placements.partial)
    return any(isinstance(placement, Partial) for placement in placements)


def noisy(program: Program) -> Callable[[], list[Outcome]]:
    """Return a function that runs the plain program a few times, with different noise."""

    def outcomes() -> list[Outcome]:
        found = []
        for seed in range(RUNS):
            with Noise(seed):
                found.append(run(program, NoisyPlain(seed), plain_value))
        return found

    return outcomes
