"""Sample calls for the verifier: those of PyTorch's operator database, and some of our own.

>>> samples("nn.functional.linear", count=2, seed=0)[0].fn
<built-in function linear>

PyTorch's database knows inputs for some 700 functions. Our own samples are for ops that it does not reach: updates of
lists of parameters, backward ops in all their variants.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch import pytree
from .._torch.testing import OpInfo, operator_database
from .checker import plain_run
from .own_samples import OWN

DTYPES = (torch.float64, torch.float32, torch.int64, torch.bool, torch.complex128)
"""What samples are made of: the first of these that an op takes."""

LARGEST = 4000  # elements of all tensors of a sample

STEPS = {torch.float64: 2.0**20, torch.complex128: 2.0**20, torch.float32: 2.0**12, torch.complex64: 2.0**12}
STEPS |= {torch.float16: 2.0**5, torch.bfloat16: 2.0**2}
"""Into how many steps a unit is divided."""

SKIPPED = ("empty", "jiterator", "sparse", "quant", "uniform", "resize_", "to_sparse", "as_strided", "_refs", "chalf")
"""Parts of names of entries without a definite result, or for another kind of tensor."""


class Sample(NamedTuple):
    """One call: a function and its arguments, and whether gradients of it can be compared."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    grad: bool = True


@lru_cache(maxsize=1)
def _database() -> dict[str, OpInfo]:
    return {name: op for name, op in operator_database().items() if not any(part in name for part in SKIPPED)}


def names() -> list[str]:
    """All entries that there are samples for; ours first."""
    return [*OWN, *_database()]


def samples(name: str, count: int, seed: int) -> list[Sample]:
    """A few samples of an entry: with tensors, small, and chosen by the seed."""
    found = [Sample(*row) for row in OWN[name]()] if name in OWN else list(_from_database(name))
    count = count if name not in OWN or count == 1 else len(found)  # each of ours is there for a reason
    if len(found) > count:
        found = random.Random(f"{seed} {name}").sample(found, count)
    return [differentiable for sample in found if (differentiable := _as_far_as_possible(sample))]


def _as_far_as_possible(sample: Sample) -> Sample | None:
    """The sample with gradients for all tensors, for the first alone, or none; None if PyTorch itself refuses it."""
    for tried in (sample, sample._replace(fn=_in_first_alone(sample.fn)), sample._replace(grad=False)):
        try:
            plain_run(*tried, 0)
        except Exception:
            continue
        return tried
    return None


def _in_first_alone(fn: Callable[..., Any]) -> Callable[..., Any]:
    def call(first: Any, *args: Any, **kwargs: Any) -> Any:
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
        tensors = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        if tensors and sum(tensor.numel() for tensor in tensors) <= LARGEST:
            yield Sample(op.op, args, kwargs)


def exact(value: Tensor) -> Tensor:
    """The value with few enough digits that the operands of a sum add up to it exactly, contiguous."""
    value = value.detach().clone(memory_format=torch.contiguous_format)
    steps = STEPS.get(value.dtype)
    if steps and value.layout is torch.strided:
        real = torch.view_as_real(value.resolve_conj().resolve_neg()) if value.is_complex() else value
        real.copy_((real * steps).round() / steps)
    return value
