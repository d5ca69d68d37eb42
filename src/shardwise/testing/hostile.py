"""Calls with data that only exact rules survive: NaNs, infinities, zeros of both signs, integers that wrap around.

A rule that lets operands stay Partial must hold for all of these. A sum may meet such numbers in the Partial operands
alone: its other operands are finite, since an infinite sum may be NaN by contract where operands of it meet infinity.
Extremes may meet them everywhere.
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
"""More than float16 holds."""


def hostile_calls(call: Recorded, found: BoundCall) -> Iterator[tuple[Recorded, str, Passing]]:
    """Yield the call with other data, and the way in which operands of that data must be able to stay Partial."""
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
    """The same data, with numbers among it that are not finite, if `anything` may be; integers keep theirs."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or not anything:
        return tensor
    numbers = [torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1.0, LARGE, -LARGE]
    chosen = torch.tensor(numbers, dtype=tensor.dtype)[torch.randint(len(numbers), tensor.shape, generator=generator)]
    return torch.where(torch.randint(2, tensor.shape, generator=generator) > 0, tensor, chosen)


def _as_integers(tensor: Tensor, anything: bool, generator: torch.Generator) -> Tensor:
    """int32 in the place of floats, up to the limits of the dtype."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    limits = torch.iinfo(torch.int32)
    drawn = torch.randint(limits.min, limits.max, tensor.shape, generator=generator)
    edges = torch.tensor([limits.min, limits.max, 0, 1, -1])[torch.randint(5, tensor.shape, generator=generator)]
    return torch.where(torch.randint(2, tensor.shape, generator=generator) > 0, drawn, edges).to(torch.int32)
