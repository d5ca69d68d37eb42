"""Sample calls for the verifier: those of PyTorch's operator database, and some of our own.

>>> samples("nn.functional.linear", count=2, seed=0)[0].fn
<built-in function linear>

PyTorch's database has inputs for some 700 functions. Our own samples are for ops that it does not reach: updates of
lists of parameters, backward ops in all their variants.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import lru_cache

import torch
from torch import Tensor

from .._torch import pytree
from .._torch.testing import OpInfo, operator_database
from .checker import Sample
from .own_samples import OWN

DTYPES = (torch.float64, torch.float32, torch.int64, torch.bool, torch.complex128)
"""The dtypes of samples, in order of preference: the first that an op supports is used."""

LARGEST = 4000  # elements of all tensors of a sample

STEPS = {torch.float64: 2.0**20, torch.complex128: 2.0**20, torch.float32: 2.0**12, torch.complex64: 2.0**12}
STEPS |= {torch.float16: 2.0**5, torch.bfloat16: 2.0**2}
"""The resolution of samples: values are multiples of 1 / steps."""

SKIPPED = ("empty", "jiterator", "sparse", "quant", "uniform", "resize_", "to_sparse", "as_strided", "_refs", "chalf")
"""Parts of names of entries with undefined results, or for other kinds of tensors."""


@lru_cache(maxsize=1)
def _database() -> dict[str, OpInfo]:
    return {name: op for name, op in operator_database().items() if not any(part in name for part in SKIPPED)}


def names() -> list[str]:
    """Return the names of all entries, our own first."""
    return [*OWN, *_database()]


def samples(name: str, count: int, seed: int) -> list[Sample]:
    """Return a few small samples of an entry, chosen by the seed; of our own entries all, unless `count` is 1."""
    found = [Sample(*row) for row in OWN[name]()] if name in OWN else list(_from_database(name))
    count = count if name not in OWN or count == 1 else len(found)
    if len(found) > count:
        found = random.Random(f"{seed} {name}").sample(found, count)
    return [usable for sample in found if (usable := _differentiable(sample))]


def _differentiable(sample: Sample) -> Sample | None:
    """Return the sample with gradients of all tensors, of the first, or of none; None if PyTorch itself refuses it."""
    for tried in (sample, sample._replace(fn=_of_first_tensor(sample.fn)), sample._replace(grad=False)):
        try:
            tried.plain()
        except Exception:
            continue
        return tried
    return None


def _of_first_tensor(fn: Callable[..., object]) -> Callable[..., object]:
    def call(first: object, *args: object, **kwargs: object) -> object:
        args, kwargs = pytree.tree_map_only(Tensor, Tensor.detach, (args, kwargs))
        return fn(first, *args, **kwargs)

    call.__name__ = getattr(fn, "__name__", str(fn))
    return call


def _from_database(name: str) -> Iterator[Sample]:
    op = _database()[name]
    dtype = next((dtype for dtype in DTYPES if op.supports_dtype(dtype, "cpu")), None)
    if dtype is None:
        return
    for given in op.sample_inputs("cpu", dtype, requires_grad=False):
        args, kwargs = pytree.tree_map_only(Tensor, exact, ((given.input, *given.args), given.kwargs))
        sample = Sample(op.op, args, kwargs)
        if name == "masked.prod" and not all(bool(tensor.isfinite().all()) for tensor in sample.tensors):
            # The derivative of a product at NaN is NaN on one device, or the product of the other factors if a zero
            # is anywhere in the tensor: one device chooses a formula by looking at the data.
            sample = sample._replace(grad=False)
        if sample.tensors and sum(tensor.numel() for tensor in sample.tensors) <= LARGEST:
            yield sample


def exact(value: Tensor) -> Tensor:
    """Return a contiguous copy with so few digits that operands of a sum add up to it exactly."""
    value = value.detach().clone(memory_format=torch.contiguous_format)
    steps = STEPS.get(value.dtype)
    if steps and value.layout is torch.strided:
        real = torch.view_as_real(value.resolve_conj().resolve_neg()) if value.is_complex() else value
        real.copy_((real * steps).round() / steps)
    return value
