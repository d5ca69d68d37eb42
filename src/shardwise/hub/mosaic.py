"""Mosaics: tensors that are put together from boxes of other tensors, as arithmetic without data.

Model hubs store some weights otherwise than modules hold them: one matrix for each expert, where the module has all of
them stacked; q, k and v apart, where the module has them in one. Their conversions are written with `torch.cat`,
`torch.stack`, `torch.chunk` and `torch.transpose`. Run on mosaics, they say which box of a file each box of a parameter
is, so that a rank reads and writes the elements of its own shard alone.

>>> gate, up = Mosaic.of("gate", (4, 8), torch.float32), Mosaic.of("up", (4, 8), torch.float32)
>>> [(piece.source, piece.at) for piece in torch.cat([gate, up]).pieces]
[('gate', (0, 0)), ('up', (4, 0))]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ..errors import InputError


class Piece(NamedTuple):
    """A box of a mosaic that is a box of a source. The other dims of the source have one index in it."""

    source: str
    start: tuple[int, ...]
    """Where it begins in the source, in each dim of that."""
    at: tuple[int, ...]
    """Where it begins in the mosaic."""
    size: tuple[int, ...]
    """How many indices it has in each dim of the mosaic."""
    dims: tuple[int | None, ...]
    """For each dim of the mosaic the dim of the source, or None for a dim of one index that the source lacks."""

    def narrowed(self, dim: int, start: int, stop: int) -> Piece | None:
        """The part of it in `[start, stop)` of a dim, for a mosaic that begins there; None if there is nothing."""
        low, high = max(self.at[dim], start), min(self.at[dim] + self.size[dim], stop)
        if low >= high:
            return None
        own, source_dim = self.start, self.dims[dim]
        if source_dim is not None:
            own = _changed(own, source_dim, own[source_dim] + low - self.at[dim])
        return self._replace(
            start=own, at=_changed(self.at, dim, low - start), size=_changed(self.size, dim, high - low)
        )

    def moved(self, dim: int, by: int) -> Piece:
        """It, further along a dim."""
        return self._replace(at=_changed(self.at, dim, self.at[dim] + by))

    def reordered(self, order: Sequence[int]) -> Piece:
        """It, with the dims of the mosaic in another order."""
        at, size = (tuple(values[dim] for dim in order) for values in (self.at, self.size))
        return Piece(self.source, self.start, at, size, tuple(self.dims[dim] for dim in order))

    def with_dim(self, dim: int) -> Piece:
        """It, with a new dim of one index."""
        at, size = ((*values[:dim], new, *values[dim:]) for values, new in ((self.at, 0), (self.size, 1)))
        return Piece(self.source, self.start, at, size, (*self.dims[:dim], None, *self.dims[dim:]))


class Mosaic:
    """A tensor without data that is put together from pieces. It has the methods of tensors that need no data."""

    def __init__(self, shape: Iterable[int], dtype: torch.dtype, pieces: Iterable[Piece]) -> None:
        self.shape, self.dtype, self.pieces = torch.Size(shape), dtype, tuple(pieces)
        self.device = torch.device("meta")

    @classmethod
    def of(cls, source: str, shape: Sequence[int], dtype: torch.dtype) -> Mosaic:
        """All of a source, as it is."""
        dims = tuple(range(len(shape)))
        start = (0,) * len(shape)
        return cls(shape, dtype, [Piece(source, start, start, tuple(shape), dims)])

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = _FUNCTIONS.get(func)
        if handler is None:
            raise _unknown(getattr(func, "__name__", str(func)))
        return handler(*args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        raise _unknown(name) if not name.startswith("_") else AttributeError(name)

    def __repr__(self) -> str:
        return f"Mosaic({list(self.shape)} of {', '.join(sorted({piece.source for piece in self.pieces}))})"

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    def dim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        """The shape, or the size of one dim."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        """The number of elements."""
        return self.shape.numel()

    def contiguous(self) -> Mosaic:
        """Return it: there is no memory in which it could lie otherwise."""
        return self

    clone = detach = contiguous

    def narrow(self, dim: int, start: int, length: int) -> Mosaic:
        """The part of it in `[start, start + length)` of a dim."""
        dim %= self.ndim
        pieces = (piece.narrowed(dim, start, start + length) for piece in self.pieces)
        return Mosaic(_changed(self.shape, dim, length), self.dtype, [piece for piece in pieces if piece is not None])

    def split(self, sizes: int | Sequence[int], dim: int = 0) -> tuple[Mosaic, ...]:
        """It in parts of these sizes."""
        total = self.shape[dim]
        if isinstance(sizes, int):
            sizes = [min(sizes, total - start) for start in range(0, total, sizes)]
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        return tuple(self.narrow(dim, start, length) for start, length in zip(starts, sizes, strict=True))

    def chunk(self, chunks: int, dim: int = 0) -> tuple[Mosaic, ...]:
        """It in so many parts, as `torch.chunk` makes them."""
        return self.split(max(1, -(-self.shape[dim] // chunks)), dim)

    def select(self, dim: int, index: int) -> Mosaic:
        """It at one index of a dim."""
        return self.narrow(dim, index, 1).squeeze(dim)

    def unbind(self, dim: int = 0) -> tuple[Mosaic, ...]:
        """It at each index of a dim."""
        return tuple(self.select(dim, index) for index in range(self.shape[dim]))

    def permute(self, *order: int) -> Mosaic:
        """It with its dims in another order."""
        order = tuple(dim % self.ndim for dim in order)
        return Mosaic([self.shape[dim] for dim in order], self.dtype, [p.reordered(order) for p in self.pieces])

    def transpose(self, dim0: int, dim1: int) -> Mosaic:
        """It with two dims exchanged."""
        order = list(range(self.ndim))
        order[dim0], order[dim1] = order[dim1], order[dim0]
        return self.permute(*order)

    def unsqueeze(self, dim: int) -> Mosaic:
        """It with a new dim of one index."""
        dim %= self.ndim + 1
        return Mosaic((*self.shape[:dim], 1, *self.shape[dim:]), self.dtype, [p.with_dim(dim) for p in self.pieces])

    def squeeze(self, dim: int | None = None) -> Mosaic:
        """It without a dim of one index, or without all of them."""
        dropped = [d for d, size in enumerate(self.shape) if size == 1 and (dim is None or d == dim % self.ndim)]
        kept = [d for d in range(self.ndim) if d not in dropped]
        return Mosaic([self.shape[d] for d in kept], self.dtype, [p.reordered(kept) for p in self.pieces])


def _cat(mosaics: Sequence[Mosaic], dim: int = 0) -> Mosaic:
    first, dim = mosaics[0], dim % mosaics[0].ndim
    pieces: list[Piece] = []
    end = 0
    for mosaic in mosaics:
        if _changed(mosaic.shape, dim, 0) != _changed(first.shape, dim, 0):
            shapes = " and ".join(str(list(each.shape)) for each in (first, mosaic))
            raise InputError(f"tensors of shapes {shapes} cannot be concatenated along dim {dim}")
        pieces += [piece.moved(dim, end) for piece in mosaic.pieces]
        end += mosaic.shape[dim]
    return Mosaic(_changed(first.shape, dim, end), first.dtype, pieces)


def _stack(mosaics: Sequence[Mosaic], dim: int = 0) -> Mosaic:
    return _cat([mosaic.unsqueeze(dim) for mosaic in mosaics], dim)


_FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.cat: _cat,
    torch.stack: _stack,
    torch.split: Mosaic.split,
    torch.chunk: Mosaic.chunk,
    torch.unbind: Mosaic.unbind,
    torch.transpose: Mosaic.transpose,
    torch.permute: lambda mosaic, dims: mosaic.permute(*dims),
    torch.squeeze: Mosaic.squeeze,
    torch.unsqueeze: Mosaic.unsqueeze,
}


def _changed(values: Sequence[int], at: int, value: int) -> tuple[int, ...]:
    return (*values[:at], value, *values[at + 1 :])


def _unknown(name: str) -> InputError:
    return InputError(
        f"the conversion between the files and the parameters of this model calls {name!r}, which does not move boxes "
        "of a tensor as they are",
        "load with from_pretrained of transformers, and distribute with parallelize_module or distribute_module",
    )
