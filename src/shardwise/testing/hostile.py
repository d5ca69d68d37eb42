"""Calls with data on which only exact rules hold: NaNs, infinities, zeros of both signs, integers that wrap around.

A rule that lets operands stay Partial must hold for all of these. For Partial sums only the Partial operands get such
numbers, and the others stay finite, since an infinite sum may by contract be NaN where its operands meet an infinity.
For extremes all operands get them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..dispatch.bind_call import BoundCall
from ..notation import Passing, passes
from .recording import Recorded

OPS = ("sum", "avg", "max", "min")
LARGE = 2.0**17
"""Larger than the largest float16."""


def hostile_calls(call: Recorded, found: BoundCall) -> Iterator[tuple[Recorded, str, Passing]]:
    """Yield the call with other data, the reduction, and the operands that must be able to stay Partial by it."""
    for op in OPS:
        for number, way in enumerate(passes(found.bound, op)):
            for kind in (_special, _as_integers):
                generator = torch.Generator().manual_seed(number)
                yield _with_data(call, found, way, kind, generator), op, way


def _with_data(
    call: Recorded,
    found: BoundCall,
    way: Passing,
    kind: Callable[[Tensor, bool, torch.Generator], Tensor],
    generator: torch.Generator,
) -> Recorded:
    stays = {place for operand, place in zip(found.operands, found.places, strict=True) if operand.position in way[0]}
    extreme = way.op in ("max", "min")

    def other(place: object, value: object) -> object:
        is_operand = isinstance(value, Tensor) and place in found.places
        return kind(value, place in stays or extreme, generator) if is_operand else value  # type: ignore[arg-type]

    args, kwargs = call.replaced(other)
    return Recorded(call.func, tuple(args), kwargs)


def _special(tensor: Tensor, anything: bool, generator: torch.Generator) -> Tensor:
    """Return the data with NaNs, infinities and zeros among it; unchanged for integers, or unless `anything`."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or not anything:
        return tensor
    numbers = [torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1.0, LARGE, -LARGE]
    chosen = torch.tensor(numbers, dtype=tensor.dtype)[torch.randint(len(numbers), tensor.shape, generator=generator)]
    return torch.where(torch.randint(2, tensor.shape, generator=generator) > 0, tensor, chosen)


def _as_integers(tensor: Tensor, anything: bool, generator: torch.Generator) -> Tensor:
    """Return random int32 in place of floats, up to the limits of the dtype; integers are unchanged."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    limits = torch.iinfo(torch.int32)
    drawn = torch.randint(limits.min, limits.max, tensor.shape, generator=generator)
    edges = torch.tensor([limits.min, limits.max, 0, 1, -1])[torch.randint(5, tensor.shape, generator=generator)]
    return torch.where(torch.randint(2, tensor.shape, generator=generator) > 0, drawn, edges).to(torch.int32)
