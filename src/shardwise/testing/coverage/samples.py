"""Sample calls from PyTorch's operator database, and random placements for them.

>>> [sample.name for sample in samples("addmm", Sweep(), count=3, seed=0)]
['addmm', 'addmm', 'addmm']
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from ..._torch import pytree
from ..._torch.testing import OpInfo, operator_database
from ...sharding.placement import Partial, Placement, Replicate, Shard
from ..checker import tensors_in
from ..samples import exact

LARGEST = 4000  # elements of all tensors of a small sample
LOOKED_AT = 120  # samples of an entry among which some are chosen
MESHES = ((4,), (2, 2))

Placed = tuple[Placement, ...]


class Sweep(NamedTuple):
    """The dtype of the samples, and which variant of each function is called."""

    dtype: str = ""
    """Empty: float32, or the first dtype that the op supports."""
    variant: str = "function"
    """`function`, `inplace`, `out`; or `strided`, `channels_last`, `expanded` for inputs that are not contiguous."""


PLAIN = Sweep()


class Sample(NamedTuple):
    """One call from the database."""

    name: str
    fn: Callable[..., object]
    args: tuple[object, ...]
    kwargs: dict[str, object]
    definite: Callable[[object], object]
    """Returns the defined part of the results: the absolute values of singular vectors, for example."""
    variant: str = "function"

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments, in order."""
        return tensors_in((self.args, self.kwargs))


def dtype_of(name: str, sweep: Sweep) -> torch.dtype | None:
    """Return the dtype of an entry's samples; None if it does not support the dtype of the sweep."""
    supported = operator_database()[name].supported_dtypes("cpu")
    if sweep.dtype:
        dtype: torch.dtype = getattr(torch, sweep.dtype)
        return dtype if dtype in supported else None
    first = sorted(supported, key=lambda dtype: (dtype not in (torch.int64, torch.complex64), str(dtype)))
    return torch.float32 if torch.float32 in supported else next(iter(first), None)


def samples(name: str, sweep: Sweep, count: int, seed: int) -> list[Sample]:
    """Return samples of an entry, chosen by the seed: with tensors, and small if there are small ones."""
    op, dtype = operator_database()[name], dtype_of(name, sweep)
    fn = _variant(op, sweep.variant)
    if dtype is None or fn is None:
        return []
    found = [sample for sample in islice(_given(name, op, fn, dtype, sweep, seed), LOOKED_AT) if _can_be_placed(sample)]
    small = [sample for sample in found if _numel(sample) <= LARGEST]
    chosen = small if len(small) >= min(count, len(found)) else sorted(found, key=_numel)[:count]
    if len(chosen) > count:
        chosen = random.Random(f"{seed} {name}").sample(chosen, count)
    return chosen


def _can_be_placed(sample: Sample) -> bool:
    tensors = sample.tensors
    return bool(tensors) and all(tensor.layout is torch.strided for tensor in tensors)


def _numel(sample: Sample) -> int:
    return sum(tensor.numel() for tensor in sample.tensors)


def _variant(op: OpInfo, variant: str) -> Callable[..., object] | None:
    if variant == "inplace":
        return op.inplace_variant
    if variant == "out":
        return op.op if op.supports_out else None
    return op.op


def _given(
    name: str, op: OpInfo, fn: Callable[..., object], dtype: torch.dtype, sweep: Sweep, seed: int
) -> Iterator[Sample]:
    """Yield the samples of the database with copies of their tensors; drawn up to three times if there are few."""
    grad = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex) and sweep.variant != "out"
    for again in range(3):
        torch.manual_seed(zlib.crc32(f"{seed} {name} {again}".encode()))
        count = 0
        for given in op.sample_inputs("cpu", dtype, requires_grad=grad):
            args, kwargs = pytree.tree_map_only(Tensor, _own, ((given.input, *given.args), given.kwargs))
            count += 1
            if sweep.variant == "inplace" and given.broadcasts_input:
                continue
            yield Sample(name, fn, args, kwargs, given.output_process_fn_grad, sweep.variant)
        if count >= 3:
            return


def _own(tensor: Tensor) -> Tensor:
    if tensor.layout is not torch.strided:
        return tensor.detach()
    own = exact(tensor.resolve_conj().resolve_neg())
    return own.requires_grad_(tensor.requires_grad)


# ---- placements -----------------------------------------------------------------------------------------------------


def choices(sample: Sample, mesh: tuple[int, ...], count: int, seed: int, number: int) -> list[tuple[Placed, ...]]:
    """Return random placements of all tensors of a sample, all different if there are enough."""
    chooser = random.Random(f"{seed} {sample.name} {number} {mesh}")
    found: dict[tuple[Placed, ...], None] = {}
    for _ in range(20 * count):
        if len(found) < count:
            found[tuple(_placed(tensor, mesh, chooser) for tensor in sample.tensors)] = None
    return list(found)


def _placed(tensor: Tensor, mesh: Sequence[int], chooser: random.Random) -> Placed:
    dtype = tensor.dtype
    reduction = chooser.choice(["sum", "sum", "sum", *_other_reductions(dtype)])
    partial = [] if dtype is torch.bool or dtype.itemsize == 1 else [Partial(reduction)]
    options: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(tensor.dim())), *partial]
    return tuple(chooser.choice(options) for _ in mesh)


def _other_reductions(dtype: torch.dtype) -> list[str]:
    if dtype.is_complex:
        return ["avg"]
    return ["avg", "max", "min"] if dtype.is_floating_point else ["max", "min"]
