"""How the result of an op is combined from its results on slices of the input.

>>> set(ways_of_tensor(torch.tensor([1.0, 2.0, 3.0]), [torch.tensor([1.0]), torch.tensor([2.0, 3.0])]))
{('concat', 0)}
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

REDUCTIONS: dict[str, Callable[..., Tensor]] = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}

Way = tuple[str, int]
"""`concat` along a dim; or `sum`, `max`, `min`, or the `same` for all pieces, each with 0."""


def ways_of_results(expected: list[list[Tensor]], pieces: Sequence[list[list[Tensor]] | None]) -> list[set[Way]]:
    """Return for each result all ways in which it is combined from the results of pieces."""
    ways: list[set[Way]] = []
    for index, tensors in enumerate(expected):
        parts = [piece[index] if piece is not None and index < len(piece) else None for piece in pieces]
        fitting = tensors and all(part is not None and len(part) == len(tensors) for part in parts)
        each = [
            set(ways_of_tensor(tensor, [part[i] for part in parts if part is not None]))
            for i, tensor in enumerate(tensors if fitting else ())
        ]
        ways.append(set.intersection(*each) if each else set())
    return ways


def ways_of_tensor(expected: Tensor, pieces: Sequence[Tensor]) -> Iterator[Way]:
    """Yield all ways in which a tensor is combined from pieces."""
    if all(_same(piece, expected) for piece in pieces):
        yield "same", 0
    if any(piece.dim() != expected.dim() or piece.dtype != expected.dtype for piece in pieces):
        return
    for dim in range(expected.dim()):
        others = {(*piece.shape[:dim], *piece.shape[dim + 1 :]) for piece in pieces}
        if len(others) == 1 and expected.shape[dim] and _same(torch.cat(list(pieces), dim), expected):
            yield "concat", dim
    if any(piece.shape != expected.shape for piece in pieces) or not expected.numel():
        return
    truth = expected.dtype is torch.bool
    stacked = torch.stack([piece.to(torch.uint8) if truth else piece for piece in pieces])
    for name, reduce in REDUCTIONS.items():
        if (name == "sum" and truth) or (name != "sum" and expected.is_complex()):
            continue
        try:
            reduced = reduce(stacked, 0).to(expected.dtype)
        except NotImplementedError:
            continue  # unsigned integers, for example
        if _same(reduced, expected):
            yield name, 0


def same_results(ones: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Return whether tensors are equal, up to the order of sums."""
    return len(ones) == len(others) and all(_same(one, other) for one, other in zip(ones, others, strict=True))


def _same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    exact = one.dtype in (torch.float64, torch.complex128)
    rtol, atol = (1e-6, 1e-9) if exact else (1e-4, 1e-5)
    scale = float(other[other.isfinite()].abs().amax()) if other.isfinite().any() else 1.0
    return torch.allclose(one, other, rtol=rtol, atol=atol * max(1.0, scale), equal_nan=True)
