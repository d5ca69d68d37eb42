"""Find how ranks hold the reference: as replicas, as shards, or as operands of a sum or an average.

A local tensor does not say how it is distributed. Axis by axis, the search tries all placements, and takes the first
that reproduces the reference.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .ranks import Close, Ranks


@dataclass(frozen=True)
class Distribution:
    """How ranks hold a tensor, for each axis that the tensor is local to."""

    placements: tuple[tuple[str, str], ...]
    """Pairs of an axis and a placement, such as ("tp", "Shard(0)")."""
    permuted: bool = False

    @property
    def partial(self) -> tuple[str, ...]:
        """The axes over which ranks hold operands of a sum or an average."""
        return tuple(axis for axis, how in self.placements if how.startswith("Partial"))

    @property
    def averaged(self) -> tuple[str, ...]:
        """The axes over which the reference is the average of what ranks hold."""
        return tuple(axis for axis, how in self.placements if how == 'Partial("avg")')

    @property
    def unsharded(self) -> bool:
        """Whether every rank holds all elements."""
        return not any(how.startswith("Shard") for _, how in self.placements)

    def __str__(self) -> str:
        return ", ".join(f"{how} over {axis}" for axis, how in self.placements if how != "Replicate()")


_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    'Partial("sum")': lambda stacked: stacked.sum(0),
    'Partial("avg")': lambda stacked: stacked.double().mean(0),
}


def explain(ranks: Ranks, reference: Tensor, close: Close, *, partial: bool) -> Distribution | None:
    """Return the distribution that reproduces the reference from what ranks hold, or None if there is no simple one.

    Sums and averages are considered if `partial`. They come after replicas and shards: a tensor is rarely Partial.
    """
    for reductions in ((), ('Partial("sum")', 'Partial("avg")')) if partial else ((),):
        # The order matters where two axes shard one dim: the inner one is concatenated first.
        for order in itertools.permutations(reversed(ranks.axes)):
            for found, placements in _leaves(ranks, order, reference, close, reductions, ()):
                if found.shape == reference.shape and close(found, reference):
                    return Distribution(_in_mesh_order(ranks.axes, placements))
    for found, placements in _leaves(ranks, tuple(reversed(ranks.axes)), reference, close, (), ()):
        if _is_permuted(found, reference, close):
            return Distribution(_in_mesh_order(ranks.axes, placements), permuted=True)
    return None


Placements = tuple[tuple[str, str], ...]


def _leaves(
    ranks: Ranks, order: tuple[str, ...], reference: Tensor, close: Close, reductions: tuple[str, ...], done: Placements
) -> Iterator[tuple[Tensor, Placements]]:
    """Yield the global tensors that the ranks may hold, with the placements that give each."""
    if not order:
        yield ranks.first(), done
        return
    axis, rest = order[0], order[1:]
    if ranks.equal_along(axis, close):
        yield from _leaves(
            ranks.along(axis, _first), rest, reference, close, reductions, (*done, (axis, "Replicate()"))
        )
    for dim in _growing_dims(ranks, axis, reference):
        joined = ranks.along(axis, lambda line, dim=dim: torch.cat(line, dim))  # type: ignore[misc]
        yield from _leaves(joined, rest, reference, close, reductions, (*done, (axis, f"Shard({dim})")))
    shapes = {value.shape for value in ranks.values.values()}
    for name in reductions if len(shapes) == 1 else ():
        reduce = _REDUCTIONS[name]
        reduced = ranks.along(axis, lambda line, reduce=reduce: reduce(torch.stack(line)))  # type: ignore[misc]
        yield from _leaves(reduced, rest, reference, close, reductions, (*done, (axis, name)))


def _first(line: list[Tensor]) -> Tensor:
    return line[0]


def _growing_dims(ranks: Ranks, axis: str, reference: Tensor) -> list[int]:
    """Return the dims along which the tensors of an axis can be concatenated without outgrowing the reference."""
    first = ranks.first()
    if first.dim() != reference.dim():
        return []
    found = []
    for dim in range(first.dim()):
        fits = all(
            sum(one.shape[dim] for one in line) <= reference.shape[dim]
            and len({(*one.shape[:dim], *one.shape[dim + 1 :]) for one in line}) == 1
            for line in ranks.lines(axis).values()
        )
        if fits:
            found.append(dim)
    return found


def _is_permuted(found: Tensor, reference: Tensor, close: Close) -> bool:
    """Return whether a tensor has the elements of the reference in another order."""
    if found.numel() != reference.numel() or found.numel() < 2 or bool((reference == reference.flatten()[0]).all()):
        return False
    return close(found.flatten().sort().values, reference.flatten().sort().values)


def _in_mesh_order(axes: tuple[str, ...], placements: Placements) -> Placements:
    return tuple(sorted(placements, key=lambda pair: axes.index(pair[0])))
