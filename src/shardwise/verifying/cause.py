"""The pattern of a difference between the tensors that ranks hold and those that they should hold.

`find_cause` compares the two grids, and looks for a pattern: a factor, a missing reduction, ranks that differ, some
rows, another order, zeros in other places.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from .ranks import Axes, Close, Ranks
from .tolerance import closeness, largest

Pattern = Literal[
    "shape", "nan", "missing", "factor", "sum", "average", "root", "ranks differ", "zeros", "rows", "permuted", "other"
]


@dataclass(frozen=True)
class Cause:
    """How a tensor differs from the reference."""

    pattern: Pattern
    text: str
    """A sentence for users, such as "2 times too large (2 is the size of tp)"."""
    axes: tuple[str, ...] = ()
    """The axes it depends on, as far as the values show."""
    factor: float = 1.0


def find_cause(got: Ranks, want: Ranks, close: Close, axes: Axes) -> Cause:
    """Return how `got`, what ranks hold, differs from `want`, what they should hold. Both have the same axes."""
    pairs = [(got.values[at], want.values[at]) for at in sorted(got.values)]
    for one, other in pairs:
        if one.shape != other.shape:
            return Cause("shape", f"has shape {list(one.shape)} instead of {list(other.shape)}")
    if any(bool((one.isnan() & ~other.isnan()).any()) for one, other in pairs if one.is_floating_point()):
        return _not_a_number(pairs)
    for find in (_as_factor, _as_zeros, _as_missing_reduction, _as_differing_ranks, _as_rows, _as_permuted):
        found = find(got, want, close, axes)
        if found is not None:
            return found
    factor = float(pairs[0][0] / pairs[0][1]) if pairs[0][1].numel() == 1 and bool(pairs[0][1]) else 1.0
    return Cause("other", f"differs {_by(pairs)}", factor=factor)


def narrowed(cause: Cause, axes: Axes) -> Cause:
    """Return the cause, restricted to these axes."""
    if cause.pattern != "factor":
        return cause
    return replace(cause, text=factor_text(cause.factor, axes), axes=axes.names)


# ---- factors ---------------------------------------------------------------------------------------------------------


def _as_factor(got: Ranks, want: Ranks, close: Close, axes: Axes) -> Cause | None:
    factor = _common_factor(got, want, close)
    if factor is None:
        return None
    if want.first().numel() == 1 and not products(abs(factor), axes):
        return None  # any two numbers have a factor: it means something only if it is a product of axis sizes
    names = tuple(dict.fromkeys(name for sets in products(abs(factor), axes) for name in sets))
    return Cause("factor", factor_text(factor, axes), names, factor)


def _common_factor(got: Ranks, want: Ranks, close: Close) -> float | None:
    """Return the factor by which all ranks' tensors differ from what they should be, or None."""
    ones = torch.cat([got.values[at].double().flatten() for at in sorted(got.values)])
    others = torch.cat([want.values[at].double().flatten() for at in sorted(got.values)])
    norm = float(others @ others)
    if not norm or not ones.isfinite().all():
        return None
    factor = float(ones @ others) / norm
    if factor == 0.0 or not math.isfinite(factor):
        return None
    tolerance = max(abs(factor), 1.0)
    return factor if close(ones / tolerance, others * (factor / tolerance)) else None


def products(factor: float, axes: Axes) -> list[tuple[str, ...]]:
    """Return the sets of axes whose sizes multiply to a factor or to its inverse, the smallest sets first."""
    named = [name for name, size in zip(axes.names, axes.sizes, strict=True) if size > 1]
    found = []
    for count in range(1, len(named) + 1):
        for chosen in itertools.combinations(named, count):
            size = math.prod(axes.size(name) for name in chosen)
            if any(math.isclose(factor, exact, rel_tol=1e-5) for exact in (size, 1 / size)):
                found.append(chosen)
        if found:
            return found
    return []


def factor_text(factor: float, axes: Axes) -> str:
    """Return a factor as text: `is tp times too large (2 is the size of tp)`."""
    if factor < 0:
        return f"is {factor:.4g} times the reference: its sign is wrong"
    large = factor > 1
    size = factor if large else 1 / factor
    direction = "too large" if large else "too small"
    sets = products(factor, axes)
    if sets:
        names = " or ".join(" x ".join(chosen) for chosen in sets)
        one = names if len(sets) == 1 else f"{size:g}"
        return f"is {one} times {direction} ({size:g} is the size of {names})"
    roots = products(factor**2, axes)
    if roots:
        names = " or ".join(" x ".join(chosen) for chosen in roots)
        return f"is {size:.6g} times {direction}, which is the square root of the size of {names}"
    return f"is {size:.6g} times {direction}"


# ---- reductions and ranks --------------------------------------------------------------------------------------------


def _as_missing_reduction(got: Ranks, want: Ranks, close: Close, axes: Axes) -> Cause | None:
    for chosen in subsets(_replicated(want)):
        over = " and ".join(chosen)
        total, expected = got, want
        for axis in chosen:
            total = total.along(axis, lambda line: torch.stack(line).sum(0))
            expected = expected.along(axis, lambda line: line[0])
        count = math.prod(axes.size(axis) for axis in chosen)
        if _all_close(total, expected, close):
            return Cause("sum", f"is not reduced: only the sum over {over} is the reference", chosen)
        mean = Ranks(total.axes, {at: value.double() / count for at, value in total.values.items()})
        if _all_close(mean, expected, close):
            return Cause("average", f"is each rank's own value: only the average over {over} is the reference", chosen)
        if got.first().dim() == 0 and _all_close(_root(got, chosen), expected, close):
            return Cause("root", f"is the norm of each rank's local shard: squares are not summed over {over}", chosen)
        factor = _common_factor(total, expected, close)
        if factor is not None and products(factor, axes):
            return Cause("sum", f"is not reduced, and the sum over {over} {factor_text(factor, axes)}", chosen, factor)
    return None


def _root(got: Ranks, chosen: tuple[str, ...]) -> Ranks:
    squares = Ranks(got.axes, {at: value.double() ** 2 for at, value in got.values.items()})
    for axis in chosen:
        squares = squares.along(axis, lambda line: torch.stack(line).sum(0))
    return Ranks(squares.axes, {at: value.sqrt() for at, value in squares.values.items()})


def _as_differing_ranks(got: Ranks, want: Ranks, close: Close, axes: Axes) -> Cause | None:
    differing = tuple(axis for axis in _replicated(want) if not got.equal_along(axis, close))
    if not differing:
        return None
    right = [at for at in sorted(got.values) if close(got.values[at], want.values[at])]
    apart = max(
        largest(one.double() - line[0].double())
        for axis in differing
        for line in got.lines(axis).values()
        for one in line
    )
    text = f"should be the same on all ranks, but differs over {' and '.join(differing)}, by up to {apart:.3g}"
    if right:
        shown = ", ".join(_at(got.axes, at) for at in right[:4])
        more, verb = " and others" if len(right) > 4 else "", "holds" if len(right) == 1 else "hold"
        text += f"; only {shown}{more} {verb} the reference"
    return Cause("ranks differ", text, differing)


def _at(names: tuple[str, ...], at: tuple[int, ...]) -> str:
    return "the rank at " + ", ".join(f"{name}={index}" for name, index in zip(names, at, strict=True))


def _replicated(want: Ranks) -> list[str]:
    """Return the axes along which all ranks should hold the same."""
    return [axis for axis in want.axes if want.equal_along(axis, closeness(0.0))]


def subsets(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Return all sets of these names but the empty one, small sets first."""
    return [chosen for count in range(1, len(names) + 1) for chosen in itertools.combinations(names, count)]


def _all_close(one: Ranks, other: Ranks, close: Close) -> bool:
    return all(close(value, other.values[at]) for at, value in one.values.items())


# ---- elements --------------------------------------------------------------------------------------------------------


def _not_a_number(pairs: list[tuple[Tensor, Tensor]]) -> Cause:
    count = sum(int((one.isnan() & ~other.isnan()).sum()) for one, other in pairs)
    return Cause("nan", f"has {count} NaN where the reference has numbers")


def _as_zeros(got: Ranks, want: Ranks, close: Close, axes: Axes) -> Cause | None:
    """Find zeros in other places, with equal values where both are not zero: another draw of a dropout mask."""
    moved = 0
    for at, one in got.values.items():
        other = want.values[at]
        moved += int(((one == 0) != (other == 0)).sum())
        both = (one != 0) & (other != 0)
        if not bool(both.any()) or not close(one[both], other[both]):
            return None
    return (
        Cause("zeros", f"is zero in other places than the reference ({moved} elements), and right elsewhere")
        if moved
        else None
    )


def _as_rows(got: Ranks, want: Ranks, close: Close, axes: Axes) -> Cause | None:
    """Find a tensor that is wrong in some neighbouring rows of one dim only."""
    for at in sorted(got.values):
        one, other = got.values[at], want.values[at]
        for dim in range(one.dim()):
            wrong = [row for row in range(one.shape[dim]) if not close(one.select(dim, row), other.select(dim, row))]
            if 0 < len(wrong) < one.shape[dim] and wrong == list(range(wrong[0], wrong[-1] + 1)):
                rows = f"row {wrong[0]}" if len(wrong) == 1 else f"rows {wrong[0]} to {wrong[-1]}"
                return Cause("rows", f"differs in {rows} of {one.shape[dim]} in dim {dim} only {_by([(one, other)])}")
    return None


def _as_permuted(got: Ranks, want: Ranks, close: Close, axes: Axes) -> Cause | None:
    pairs = [(got.values[at].flatten(), want.values[at].flatten()) for at in got.values]
    if all(len(one) > 1 and close(one.sort().values, other.sort().values) for one, other in pairs):
        return Cause("permuted", "has the elements of the reference in another order")
    return None


def _by(pairs: list[tuple[Tensor, Tensor]]) -> str:
    apart = max((largest(one.double() - other.double()) for one, other in pairs), default=0.0)
    return f"by up to {apart:.3g}, where the reference is up to {max(largest(other) for _, other in pairs):.3g}"
