"""What the ranks of a mesh hold of one tensor, as a grid of plain tensors.

A `Ranks` has some axes of the mesh, and a tensor for each coordinate on them. `along` removes one axis: it combines the
tensors of the ranks that differ in that axis alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..tensor.dtensor import DTensor
from ..testing.values import assemble
from ..world import RankTensor

Coordinate = tuple[int, ...]
Close = Callable[[Tensor, Tensor], bool]


@dataclass(frozen=True)
class Axes:
    """Names and sizes of the axes of the mesh, outermost first."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def size(self, name: str) -> int:
        """Return the size of an axis."""
        return self.sizes[self.names.index(name)]

    def coordinates(self) -> list[Coordinate]:
        """Return the coordinate of every rank."""
        return list(itertools.product(*map(range, self.sizes)))

    def __str__(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in zip(self.names, self.sizes, strict=True))


@dataclass(frozen=True)
class Ranks:
    """One tensor for each coordinate on some axes of the mesh."""

    axes: tuple[str, ...]
    values: dict[Coordinate, Tensor]

    def lines(self, axis: str) -> dict[Coordinate, list[Tensor]]:
        """Return, for each coordinate on the other axes, the tensors along this axis."""
        at = self.axes.index(axis)
        found: dict[Coordinate, list[Tensor]] = {}
        for place in sorted(self.values):
            found.setdefault(place[:at] + place[at + 1 :], []).append(self.values[place])
        return found

    def along(self, axis: str, combine: Callable[[list[Tensor]], Tensor]) -> Ranks:
        """Combine the tensors along an axis; the result lacks it."""
        others = tuple(name for name in self.axes if name != axis)
        return Ranks(others, {place: combine(line) for place, line in self.lines(axis).items()})

    def equal_along(self, axis: str, close: Close) -> bool:
        """Return whether ranks that differ in this axis alone hold the same."""
        return all(
            one.shape == line[0].shape and close(one, line[0]) for line in self.lines(axis).values() for one in line[1:]
        )

    def without_axes_of_size_1(self) -> Ranks:
        """Return the same grid without axes on which there is one rank."""
        found = self
        for axis in self.axes:
            if all(len(line) == 1 for line in found.lines(axis).values()):
                found = found.along(axis, lambda line: line[0])
        return found

    def first(self) -> Tensor:
        """Return the tensor of the first rank."""
        return self.values[min(self.values)]


def held(value: Tensor, axes: Axes, close: Close) -> Ranks:
    """Return what ranks hold of a tensor. A DTensor is assembled over the axes of its mesh, which the result lacks.

    An axis remains if the tensor is local to its ranks, or if a DTensor is replicated over it and replicas differ.
    """
    if isinstance(value, DTensor):
        return _of_dtensor(value, axes, close).without_axes_of_size_1()
    if isinstance(value, RankTensor) and len(value.shards) == len(axes.coordinates()):
        grid = Ranks(axes.names, dict(zip(axes.coordinates(), map(_wide, value.shards), strict=True)))
        return grid.without_axes_of_size_1()
    return Ranks((), {(): _wide(value.shards[0] if isinstance(value, RankTensor) else value)})


def _of_dtensor(value: DTensor, axes: Axes, close: Close) -> Ranks:
    spec, shards = value._spec, value._local_shard.shards  # type: ignore[attr-defined]
    info = spec.mesh_info
    own = [name for name, placement in zip(info.names, spec.placements, strict=True) if placement.is_replicate()]
    if not info.covers_world() or not set(info.names) <= set(axes.names):  # a mesh of the program's own
        return Ranks((), {(): _wide(assemble(value, instance=0))})
    grid = Ranks(axes.names, dict(zip(axes.coordinates(), shards, strict=True)))
    differing = [name for name in own if not grid.equal_along(name, close)]
    left = tuple(name for name in axes.names if name not in info.names or name in differing)
    found: dict[Coordinate, Tensor] = {}
    places = axes.coordinates()
    for at in itertools.product(*(range(axes.size(name)) for name in left)):
        fixed = dict(zip(left, at, strict=True))
        chosen = _with_fixed(places, shards, axes, fixed, own)
        found[at] = _wide(assemble(DTensor(RankTensor(chosen), spec), instance=0))
    return Ranks(left, found)


def _with_fixed(
    places: Sequence[Coordinate], shards: Sequence[Tensor], axes: Axes, fixed: dict[str, int], replicated: Sequence[str]
) -> list[Tensor]:
    """Return a shard for each rank: that at the `fixed` coordinates, and at 0 on the other replicated axes."""
    by_place = dict(zip(places, shards, strict=True))
    chosen = []
    for place in places:
        at = dict(zip(axes.names, place, strict=True))
        at |= dict.fromkeys(replicated, 0) | fixed
        chosen.append(by_place[tuple(at[name] for name in axes.names)])
    return chosen


def _wide(tensor: Tensor) -> Tensor:
    """Return a tensor in float64 or int64, in which comparing does not round."""
    tensor = tensor.detach()
    if tensor.is_complex():
        return torch.view_as_real(tensor).double()
    return tensor.double() if tensor.is_floating_point() else tensor.to(torch.int64)
