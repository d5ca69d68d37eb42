"""Random choices for statements: variables so far, dims, numbers and placements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import TypeVar

import torch
from torch import Tensor

from ...errors import LayoutError
from ...sharding.from_placements import default_order, from_placements
from ...sharding.placement import AnyShard, InterleavedShard, Partial, Placement, Replicate, Shard
from .sides import AXES

T = TypeVar("T")
MESHES = ((2,), (3,), (4,), (2, 2), (1, 3), (2, 3), (3, 2), (4, 1), (2, 1, 2), (2, 2, 2), (2, 4), (3, 1, 2))
GLOO_MESHES = ((4,), (2, 2), (1, 4), (4, 1), (2, 1, 2), (1, 2, 2), (2, 2, 1))
FLOATS = (torch.float32, torch.float32, torch.float32, torch.float64, torch.float64, torch.bfloat16, torch.float16)
OTHERS = (torch.int64, torch.int64, torch.int32, torch.bool, torch.uint8, torch.int8, torch.complex64)
WRONG = 0.02  # the probability of a choice that does not fit


class NoChoice(Exception):
    """No variable fits."""


class Draw:
    """A source of random choices, and the variables of the program so far, as plain tensors."""

    def __init__(self, seed: int, meshes: Sequence[tuple[int, ...]] = MESHES) -> None:
        self.random = Random(seed)
        self.mesh = self.one(meshes)
        self.variables: dict[str, object] = {}
        self.inexact: set[str] = set()
        """Variables made from NaN or from sums of Partial tensors: their bits depend on the order of operations."""
        self.sizes = self.random.sample((2, 3, 4, 5, 6, 8), 3)
        if self.chance(0.1):
            self.sizes.append(0)
        if self.chance(0.2):
            self.sizes.append(1)

    # ---- choices --------------------------------------------------------------------------------------------------

    def one(self, options: Sequence[T]) -> T:
        """Return one of these."""
        return self.random.choice(options)

    def chance(self, probability: float) -> bool:
        """Return True with this probability."""
        return self.random.random() < probability

    def number(self) -> str:
        """Return a number to compute with."""
        return self.one(("2", "0.5", "-1", "3", "1", "-0.25", "0", "1.5"))

    # ---- variables ------------------------------------------------------------------------------------------------

    def value(self, name: str) -> Tensor:
        """Return the plain value of a variable."""
        value = self.variables[name]
        assert isinstance(value, Tensor)
        return value

    def tensor(self, test: Callable[[Tensor], bool] = lambda t: True) -> str:
        """Return a variable that is a tensor for which `test` holds; later ones more often."""
        fitting = [n for n, v in self.variables.items() if isinstance(v, Tensor) and (test(v) or self.chance(WRONG))]
        if not fitting:
            raise NoChoice
        return fitting[max(self.random.randrange(len(fitting)), self.random.randrange(len(fitting)))]

    def floating(self, dims: int = 0) -> str:
        """Return a variable of a floating-point dtype with at least this many dims."""
        return self.tensor(lambda t: t.is_floating_point() and t.dim() >= dims)

    def dims(self, least: int = 1) -> str:
        """Return a variable with at least this many dims."""
        return self.tensor(lambda t: t.dim() >= least)

    def shaped(self, shape: Sequence[int]) -> str:
        """Return a variable of this shape."""
        return self.tensor(lambda t: tuple(t.shape) == tuple(shape))

    def broadcastable(self, name: str) -> str:
        """Return a variable that can be combined with another one element by element."""
        shape = self.value(name).shape

        def fits(other: Tensor) -> bool:
            try:
                torch.broadcast_shapes(shape, other.shape)
            except RuntimeError:
                return False
            return True

        return self.tensor(fits)

    def index(self, size: int) -> str:
        """Return a variable with indices below a size."""
        return self.tensor(
            lambda t: t.dtype is torch.int64 and bool((t < max(size, 1)).all()) and bool((t >= -size).all())
        )

    def memory(self, name: str) -> int:
        """Return where the storage of a variable begins."""
        return self.value(name).untyped_storage().data_ptr()

    def overlaps(self, name: str) -> bool:
        """Return whether some elements of a variable share memory."""
        value = self.value(name)
        if not value.numel():
            return False
        span = 1 + sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True))
        places = torch.arange(span).as_strided(value.shape, value.stride())
        return places.unique().numel() < value.numel()

    def has_windows(self, name: str) -> bool:
        """Return whether a variable has windows that overlap: reading and writing it in place has no defined order."""
        value = self.value(name)
        return self.overlaps(name) and all(step for n, step in zip(value.shape, value.stride(), strict=True) if n > 1)

    def storage_is_known(self, name: str) -> bool:
        """Return whether a variable covers the storage of this one: results may have more memory than elements."""
        memory = self.memory(name)
        covering = [v for n, v in self.variables.items() if isinstance(v, Tensor) and self.memory(n) == memory]
        known = max((v.nbytes for v in covering if v.is_contiguous() and not v.storage_offset()), default=0)
        return self.value(name).untyped_storage().nbytes() <= known

    def elsewhere(self, name: str, written: str) -> str:
        """Return a variable, or a copy if it shares memory with another one that is written while it is read."""
        return f"{name}.clone()" if self.memory(name) == self.memory(written) else name

    # ---- dims and sizes -------------------------------------------------------------------------------------------

    def dim(self, name: str) -> int:
        """Return a dim of a variable, perhaps counted from the end."""
        ndim = self.value(name).dim()
        if ndim == 0 or self.chance(WRONG):
            return self.one((0, -1, ndim))
        return self.random.randrange(-ndim, ndim)

    def size(self, name: str, dim: int) -> int:
        """Return the size of a dim, 0 if there is no such dim."""
        shape = self.value(name).shape
        return int(shape[dim]) if -len(shape) <= dim < len(shape) else 0

    def position(self, size: int) -> int:
        """Return an index into a dim of this size."""
        if size == 0 or self.chance(WRONG):
            return self.one((0, size, -size - 1))
        return self.random.randrange(-size, size)

    def shape(self) -> tuple[int, ...]:
        """Return the shape of a new tensor."""
        return tuple(self.one(self.sizes) for _ in range(self.one((0, 1, 1, 2, 2, 2, 3, 3, 4))))

    # ---- placements -----------------------------------------------------------------------------------------------

    def placements(self, shape: Sequence[int], dtype: torch.dtype) -> str:
        """Return placements that a tensor can have, as text."""
        if shape and self.chance(0.1):
            return self._p_form(len(shape))
        drawn = [self._placement(shape, dtype) for _ in self.mesh]
        if not _legal(self.mesh, shape, drawn):
            drawn = [Shard(p.dim) if isinstance(p, AnyShard) else p for p in drawn]
        return placements_text(drawn)

    def _placement(self, shape: Sequence[int], dtype: torch.dtype) -> Placement:
        kind = self.one("rsssspi" if shape else "rp")
        if kind == "p":
            ops = ["sum", "sum", "max", "min", "product", "avg"]
            if dtype.is_complex:
                ops = ["sum", "product", "avg"]
            elif dtype in (torch.bfloat16, torch.float16):  # sums of rounded operands are not comparable
                ops = ["max", "min"]
            elif not dtype.is_floating_point:
                ops.remove("avg")
            return Partial(self.one(ops))
        if kind == "r":
            return Replicate()
        dim = self.random.randrange(len(shape))
        return Shard(dim) if kind == "s" else InterleavedShard(dim, self.one((2, 3)))

    def _p_form(self, ndim: int) -> str:
        """Return `P(...)` with axes in any order."""
        dims: list[list[str]] = [[] for _ in range(ndim)]
        for axis in self.random.sample(AXES[: len(self.mesh)], len(self.mesh)):
            place = self.random.randrange(-1, ndim)
            if place >= 0:
                dims[place].append(axis)
        entries = [None if not axes else axes[0] if len(axes) == 1 else tuple(axes) for axes in dims]
        return f"P({', '.join(map(repr, entries))})"


def placements_text(placements: Sequence[Placement]) -> str:
    """Return placements as Python."""
    return f"[{', '.join(map(_text, placements))}]"


def _text(placement: Placement) -> str:
    if isinstance(placement, InterleavedShard):
        return f"InterleavedShard({placement.dim}, {placement.blocks})"
    if isinstance(placement, AnyShard):
        return f"Shard({placement.dim})"
    return f'Partial("{placement.reduce_op}")' if isinstance(placement, Partial) else "Replicate()"


def _legal(mesh: tuple[int, ...], shape: Sequence[int], placements: Sequence[Placement]) -> bool:
    try:
        from_placements(mesh, tuple(shape), placements, default_order(placements))
    except LayoutError:
        return False
    return True
