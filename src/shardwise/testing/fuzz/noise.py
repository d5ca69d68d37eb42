"""Rounding errors on purpose: the plain program, with every inexact result off by a few units in the last place.

Sums in another order round differently, and a program may enlarge that: `x - x.mean()`, `floor`, a comparison. What
changes under noise is not a result of the program but of its rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..._torch import pytree
from ..._torch.modes import TorchDispatchMode
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
    mm bmm addmm baddbmm mv dot sum mean linalg_vector_norm convolution var std cumsum
""")


class Noise(TorchDispatchMode):
    """Changes the floating-point results of inexact ops in their last digits."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed, self.generator = seed, torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an op and change its results."""
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.rstrip("_")
        if not func.is_view and name not in EXACT:
            pytree.tree_map_only(Tensor, self._disturb, result)
        if name in SUMS:
            pytree.tree_map_only(Tensor, self._disturb_zeros, result)
        return result

    def _disturb_zeros(self, x: Tensor) -> Tensor:
        """Change what cancels: a sum that is zero in one order is almost zero in another."""
        if x.dtype.is_floating_point and x.numel() and x.is_contiguous():
            scale = float(x.abs().max()) * torch.finfo(x.dtype).eps
            x.add_((torch.randn(x.shape, generator=self.generator) * scale).to(x.dtype))
        return x

    def _disturb(self, x: Tensor) -> Tensor:
        # Zeros that autograd makes for derivatives known to be zero have elements, but no memory.
        if (x.dtype.is_floating_point or x.dtype.is_complex) and x.numel() and x.data_ptr():
            noise = torch.randn(x.shape, generator=self.generator) * (UNITS * torch.finfo(x.dtype).eps)
            if all(stride or size == 1 for size, stride in zip(x.shape, x.stride(), strict=True)):
                x.mul_((1 + noise.double()).to(x.dtype) if not x.dtype.is_complex else 1 + noise)
                if x.dtype.is_floating_point and self.seed < len(NANS):
                    x.masked_fill_(x.isnan(), NANS[self.seed])
        return x


def noisy(program: Program) -> Callable[[], list[Outcome]]:
    """Return a function that runs the plain program a few times, with different noise."""

    def outcomes() -> list[Outcome]:
        found = []
        for seed in range(RUNS):
            with Noise(seed):
                found.append(run(program, Plain(), plain_value))
        return found

    return outcomes
