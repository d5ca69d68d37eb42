"""Distribution states: which mesh axes shard each factor of a tensor, and which are Partial."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..sharding.layout import Dim, Factor, Layout, PartialAxes, Sizes, plain_dim, split_factor

Axes = tuple[int, ...]


class DistState(NamedTuple):
    """Which axes shard each slot, major to minor, and which axes are Partial by which op."""

    slots: tuple[Axes, ...]
    partial: PartialAxes


# ---- slots ---------------------------------------------------------------------------------------------------


class Slots(NamedTuple):
    """The factor sizes that source and target share, dim by dim, and both layouts as states over them."""

    sizes: tuple[tuple[int, ...], ...]
    source: DistState
    target: DistState

    def layout(self, mesh_sizes: Sizes, state: DistState) -> Layout:
        """Return the layout that a state over these slots describes."""
        dims: list[Dim]
        if len(state.slots) == len(self.sizes):
            dims = [plain_dim(size, axes) for (size,), axes in zip(self.sizes, state.slots, strict=True)]
        else:
            slots = iter(state.slots)
            dims = [tuple(Factor(size, next(slots)) for size in dim) for dim in self.sizes]
        return Layout.make(mesh_sizes, dims, state.partial)


def common_slots(source: Layout, target: Layout) -> Slots | None:
    """Return both layouts over factors of the same sizes, or None if their shard boundaries do not allow it.

    Axes of size 1 are left out.
    """
    mesh_sizes = source.mesh_sizes
    if source.unfactored and target.unfactored and 1 not in mesh_sizes:  # the usual case: one factor in each dim
        return Slots(
            tuple([(dim[0].size,) for dim in source.dims]),
            DistState(tuple([dim[0].axes for dim in source.dims]), source.partial),
            DistState(tuple([dim[0].axes for dim in target.dims]), target.partial),
        )
    sizes, source_axes, target_axes = [], [], []
    for one, other in zip(source.dims, target.dims, strict=True):
        pair = _refine(mesh_sizes, _drop_single(mesh_sizes, one), _drop_single(mesh_sizes, other))
        if pair is None:
            return None
        sizes.append(tuple(factor.size for factor in pair[0]))
        source_axes += [factor.axes for factor in pair[0]]
        target_axes += [factor.axes for factor in pair[1]]

    def state(axes: list[Axes], layout: Layout) -> DistState:
        return DistState(tuple(axes), tuple(entry for entry in layout.partial if mesh_sizes[entry[0]] > 1))

    return Slots(tuple(sizes), state(source_axes, source), state(target_axes, target))


def _drop_single(mesh_sizes: Sizes, dim: Dim) -> Dim:
    return tuple(Factor(f.size, tuple(a for a in f.axes if mesh_sizes[a] > 1)) for f in dim)


def _refine(mesh_sizes: Sizes, one: Dim, other: Dim) -> tuple[Dim, Dim] | None:
    """Split the factors of two dims of equal size until their sizes agree; None if that is impossible."""
    left, right = list(one), list(other)
    done: tuple[list[Factor], list[Factor]] = ([], [])
    while left and right:
        a, b = left.pop(0), right.pop(0)
        if a.size != b.size:
            larger, smaller, rest = (a, b, left) if a.size > b.size else (b, a, right)
            split = split_factor(mesh_sizes, larger, smaller.size)
            if split is None:
                return None
            rest.insert(0, split[1])
            a, b = (split[0], b) if larger is a else (a, split[0])
        done[0].append(a)
        done[1].append(b)
    if any(factor.size != 1 or factor.axes for factor in left + right):
        return None
    return tuple(done[0]), tuple(done[1])


# ---- sizes -----------------------------------------------------------------------------------------------------


def product(mesh_sizes: Sizes, axes: Sequence[int]) -> int:
    """Return the number of ranks over these axes."""
    result = 1
    for axis in axes:
        result *= mesh_sizes[axis]
    return result


def held(mesh_sizes: Sizes, state: DistState) -> float:
    """Return what a rank holds, as a fraction of the global tensor."""
    pieces = 1
    for axes in state.slots:
        for axis in axes:
            pieces *= mesh_sizes[axis]
    return 1.0 / pieces


def lacking(mesh_sizes: Sizes, state: DistState, target: DistState) -> float:
    """Return the most that any rank lacks of its target shard, as a fraction of the global tensor.

    Every plan receives at least this much.
    """
    finest = wanted = 1
    diverges = False
    for have, want in zip(state.slots, target.slots, strict=True):
        if have == want:
            if want:
                pieces = product(mesh_sizes, want)
                wanted *= pieces
                finest *= pieces
            continue
        pieces_want = product(mesh_sizes, want)
        wanted *= pieces_want
        shared = min(len(have), len(want))
        diverges = diverges or have[:shared] != want[:shared]
        finest *= max(product(mesh_sizes, have), pieces_want)
    return 1.0 / wanted - (0.0 if diverges else 1.0 / finest)


def axes_to_exchange_over(state: DistState, target: DistState) -> Axes:
    """Return the axes of an exchange: those of each source slot after the major axes it shares with the target."""
    axes: list[int] = []
    for have, want in zip(state.slots, target.slots, strict=True):
        if have == want:
            continue
        shared = 0
        for mine, its in zip(have, want, strict=False):
            if mine != its:
                break
            shared += 1
        axes += have[shared:]
    return tuple(sorted(axes))
