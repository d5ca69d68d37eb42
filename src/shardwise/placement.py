"""Placements: what one mesh axis does to a tensor.

A list with one placement per mesh axis describes a distributed tensor. `P` is the same thing told from the
tensor's side: for each tensor dim, the names of the axes that cut it, major to minor.

>>> Shard(0), Replicate(), Partial("max")
(Shard(dim=0), Replicate(), Partial(max))
>>> P("dp", ("tp", "cp"), None)
P('dp', ('tp', 'cp'), None)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .errors import InputError, PlacementError

REDUCE_OPS = ("sum", "avg", "max", "min", "product")


@dataclass(frozen=True)
class Placement:
    """What one mesh axis does to a tensor: cut it, copy it, or hold summands of it."""

    def is_shard(self, dim: int | None = None) -> bool:
        """Whether this axis cuts a tensor dim (that dim, when one is given)."""
        return False

    def is_replicate(self) -> bool:
        """Whether every rank along this axis holds the same values."""
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Whether the value is a reduction over this axis (by that op, when one is given)."""
        return False


@dataclass(frozen=True)
class Shard(Placement):
    """The axis cuts tensor dim `dim` the way `torch.chunk` does: the last ranks may hold less, or nothing."""

    dim: int

    def __post_init__(self) -> None:
        if not isinstance(self.dim, int) or isinstance(self.dim, bool):
            raise InputError(f"Shard(dim={self.dim!r})", "the dim is an int, e.g. Shard(0)")

    def is_shard(self, dim: int | None = None) -> bool:
        return dim is None or self.dim == dim

    def __repr__(self) -> str:
        return f"Shard(dim={self.dim})"


@dataclass(frozen=True)
class InterleavedShard(Shard):
    """The axis cuts `dim` inside each of `blocks` equal blocks: every rank holds a piece of every block.

    With 8 rows, 2 blocks and 2 ranks, rank 0 holds rows 0, 1, 4, 5. This is how a fused `[q; k; v]` weight is
    cut by heads (3 blocks), and what a flattened `(batch, sequence)` dim looks like when the sequence is cut.
    """

    blocks: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.blocks, int) or self.blocks < 1:
            raise InputError(f"InterleavedShard(blocks={self.blocks!r})", "the number of blocks is an int >= 1")

    def __repr__(self) -> str:
        return f"InterleavedShard(dim={self.dim}, blocks={self.blocks})"


@dataclass(frozen=True)
class Replicate(Placement):
    """Every rank along the axis holds the same values."""

    def is_replicate(self) -> bool:
        return True

    def __repr__(self) -> str:
        return "Replicate()"


@dataclass(frozen=True)
class Partial(Placement):
    """Every rank along the axis holds an operand; the value is their reduction by `reduce_op`."""

    reduce_op: str = "sum"

    def __post_init__(self) -> None:
        if self.reduce_op not in REDUCE_OPS:
            raise PlacementError(
                f"Partial({self.reduce_op!r}) is no known reduction", f"use one of {', '.join(REDUCE_OPS)}"
            )

    def is_partial(self, reduce_op: str | None = None) -> bool:
        return reduce_op is None or self.reduce_op == reduce_op

    def __repr__(self) -> str:
        return f"Partial({self.reduce_op})"


class ShardOrderEntry(NamedTuple):
    """The mesh axes that cut one tensor dim, major to minor."""

    tensor_dim: int
    mesh_dims: tuple[int, ...]


ShardOrder = tuple[ShardOrderEntry, ...]
"""One entry for each tensor dim that is cut, by ascending tensor dim."""

DimAxes = str | tuple[str, ...] | None


class P:
    """Placements told per tensor dim: the mesh axis, or tuple of axes (major to minor), that cuts each dim.

    Dims left out at the end are not cut, axes that are not named replicate, and `partial` names the axes that
    hold operands of a reduction.

    >>> P("dp", ("tp", "cp"), None, partial={"ep": "sum"})
    P('dp', ('tp', 'cp'), None, partial={'ep': 'sum'})
    """

    __slots__ = ("dims", "partial")

    def __init__(self, *dims: DimAxes, partial: Mapping[str, str] | None = None) -> None:
        for entry in dims:
            names = entry if isinstance(entry, tuple) else (entry,)
            if not all(name is None or isinstance(name, str) for name in names) or names.count(None) != (entry is None):
                raise InputError(f"P(...) got {entry!r}", "each entry is an axis name, a tuple of axis names, or None")
        self.dims = dims
        self.partial = dict(partial or {})

    def __repr__(self) -> str:
        parts = [repr(entry) for entry in self.dims]
        if self.partial:
            parts.append(f"partial={self.partial!r}")
        return f"P({', '.join(parts)})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, P) and (self.dims, self.partial) == (other.dims, other.partial)

    def __hash__(self) -> int:
        return hash((self.dims, tuple(sorted(self.partial.items()))))

    def resolve(self, axis_names: Sequence[str], ndim: int) -> tuple[tuple[Placement, ...], ShardOrder]:
        """The placement of every axis of a mesh with these names, and the order of the cuts."""
        if len(self.dims) > ndim:
            raise PlacementError(
                f"{self!r} names {len(self.dims)} dims of a tensor that has {ndim}", "give at most one entry a dim"
            )
        placements: dict[str, Placement] = {}
        order: list[ShardOrderEntry] = []
        for dim, entry in enumerate(self.dims):
            names = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
            self._take(placements, axis_names, dict.fromkeys(names, Shard(dim)), len(names))
            if names:
                order.append(ShardOrderEntry(dim, tuple(axis_names.index(name) for name in names)))
        self._take(placements, axis_names, {a: Partial(op) for a, op in self.partial.items()}, len(self.partial))
        return tuple(placements.get(name, Replicate()) for name in axis_names), tuple(order)

    def _take(
        self, taken: dict[str, Placement], axis_names: Sequence[str], new: Mapping[str, Placement], count: int
    ) -> None:
        for name in new:
            if name not in axis_names:
                raise PlacementError(
                    f"{self!r} names the axis {name!r}", f"the mesh has the axes {', '.join(axis_names)}"
                )
            if name in taken:
                raise PlacementError(f"{self!r} uses the axis {name!r} twice", "an axis does one thing to a tensor")
        if len(new) != count:
            raise PlacementError(f"{self!r} uses an axis twice on one dim", "an axis cuts a dim once")
        taken.update(new)


Placements = Sequence[Placement] | P
"""What every public function accepts to say how a tensor is distributed."""
