"""Mosaics: tensors without data that are assembled from strided boxes of other tensors.

Checkpoints on model hubs store some weights in another form than modules do: one matrix for each expert where the
module has a stacked parameter; q, k and v in one matrix where the module has three; the features of a head in another
order. The conversions of transformers use functions that only move elements: `torch.cat`, `torch.stack`,
`torch.chunk`, `torch.transpose`, `Tensor.reshape`. Run on mosaics, they compute which elements of a file are which
elements of a parameter, so that a rank reads and writes only the elements of its own shard.

>>> gate, up = Mosaic.of("gate", (4, 8), torch.float32), Mosaic.of("up", (4, 8), torch.float32)
>>> [(piece.source, piece.at) for piece in torch.cat([gate, up]).pieces]
[('gate', (0, 0)), ('up', (4, 0))]
>>> [(piece.offset, piece.strides) for piece in gate.view(2, 2, 8).transpose(0, 1).reshape(4, 8).pieces]
[(0, (16, 1)), (8, (16, 1))]
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ..errors import InputError


class Piece(NamedTuple):
    """A box of a mosaic whose elements are at regular distances in a source, a tensor of a file or of the model."""

    source: str
    offset: int
    """The index of its first element in the source, counted in row-major order."""
    at: tuple[int, ...]
    """The start of the box in the mosaic."""
    size: tuple[int, ...]
    """The size of the box in each dim of the mosaic."""
    strides: tuple[int, ...]
    """For each dim of the mosaic, the distance of neighbours in the source, in elements."""

    def narrowed(self, dim: int, start: int, stop: int) -> Piece | None:
        """Return the part in `[start, stop)` of a dim, for the mosaic narrowed to that range; None if it is empty."""
        low, high = max(self.at[dim], start), min(self.at[dim] + self.size[dim], stop)
        if low >= high:
            return None
        return self._replace(
            offset=self.offset + (low - self.at[dim]) * self.strides[dim],
            at=_changed(self.at, dim, low - start),
            size=_changed(self.size, dim, high - low),
        )

    def moved(self, dim: int, by: int) -> Piece:
        """Return the piece, shifted by this much along a dim."""
        return self._replace(at=_changed(self.at, dim, self.at[dim] + by))

    def reordered(self, order: Sequence[int]) -> Piece:
        """Return the piece for the mosaic with these of its dims, in this order."""
        at, size, strides = (tuple(values[dim] for dim in order) for values in self[2:])
        return self._replace(at=at, size=size, strides=strides)

    def with_dim(self, dim: int) -> Piece:
        """Return the piece for the mosaic with a new dim of size 1."""
        new = zip(self[2:], (0, 1, 0), strict=True)
        at, size, strides = ((*values[:dim], value, *values[dim:]) for values, value in new)
        return self._replace(at=at, size=size, strides=strides)

    def split_dim(self, dim: int, inner: int) -> Iterator[Piece]:
        """Yield the parts of the piece for the mosaic with a dim split in two, the second of size `inner`.

        A piece that begins or ends inside a row of `inner` indices becomes up to three.
        """
        start, stop = self.at[dim], self.at[dim] + self.size[dim]
        first, last = -(-start // inner), stop // inner  # complete rows
        bounds = [start, *(row * inner for row in (first, last) if start < row * inner < stop), stop]
        for low, high in itertools.pairwise(bounds):
            if low == high:
                continue
            rows = max(1, (high - low) // inner)
            yield self._replace(
                offset=self.offset + (low - start) * self.strides[dim],
                at=(*self.at[:dim], low // inner, low % inner, *self.at[dim + 1 :]),
                size=(*self.size[:dim], rows, (high - low) // rows, *self.size[dim + 1 :]),
                strides=(*self.strides[:dim], inner * self.strides[dim], *self.strides[dim:]),
            )

    def merge_dim(self, dim: int, inner: int) -> Iterator[Piece]:
        """Yield the parts of the piece for the mosaic with a dim and the next one, of size `inner`, merged.

        The piece stays one if its rows are complete and consecutive in the source. Otherwise each row is a piece.
        """
        rows, length = self.size[dim : dim + 2]
        outer, stride = self.strides[dim : dim + 2]
        complete = length == inner and (outer == inner * stride or inner == 1)
        count = 1 if complete or rows == 1 else rows
        for row in range(count):
            yield self._replace(
                offset=self.offset + row * outer,
                at=(*self.at[:dim], (self.at[dim] + row) * inner + self.at[dim + 1], *self.at[dim + 2 :]),
                size=(*self.size[:dim], rows // count * length, *self.size[dim + 2 :]),
                strides=(*self.strides[:dim], outer if inner == 1 else stride, *self.strides[dim + 2 :]),
            )


class Mosaic(torch.Tensor):
    """A tensor without data that is assembled from pieces. Functions that move elements return another mosaic.

    It is a meta tensor, since conversions test for tensors by isinstance. Functions that are not in the tables below
    raise an error that names them.
    """

    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, source: str, shape: Sequence[int], dtype: torch.dtype) -> Mosaic:
        """Return a mosaic of one piece: the complete source."""
        at = (0,) * len(shape)
        return _mosaic(shape, dtype, [Piece(source, 0, at, tuple(shape), row_major(shape))])

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        handler = _FUNCTIONS.get(func)
        if handler is not None:
            return handler(*args, **(kwargs or {}))
        if func not in _METADATA:
            raise _unknown(getattr(func, "__name__", str(func)))
        return super().__torch_function__(func, types, args, kwargs)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"Mosaic({list(self.shape)} of {', '.join(sorted({piece.source for piece in self.pieces}))})"


def _mosaic(shape: Iterable[int], dtype: torch.dtype, pieces: Iterable[Piece]) -> Mosaic:
    made = torch.empty(tuple(shape), dtype=dtype, device="meta").as_subclass(Mosaic)
    made.pieces = tuple(pieces)
    return made


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of this shape."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


# ---- functions that move elements ------------------------------------------------------------------------------------


def _unchanged(mosaic: Mosaic, **options: object) -> Mosaic:
    return mosaic


def _narrow(mosaic: Mosaic, dim: int, start: int, length: int) -> Mosaic:
    dim %= mosaic.ndim
    pieces = (piece.narrowed(dim, start, start + length) for piece in mosaic.pieces)
    shape = _changed(mosaic.shape, dim, length)
    return _mosaic(shape, mosaic.dtype, [piece for piece in pieces if piece is not None])


def _split(mosaic: Mosaic, split_size_or_sections: int | Sequence[int], dim: int = 0) -> tuple[Mosaic, ...]:
    sizes, total = split_size_or_sections, mosaic.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, total - start) for start in range(0, total, sizes)]
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return tuple(_narrow(mosaic, dim, start, length) for start, length in zip(starts, sizes, strict=True))


def _chunk(mosaic: Mosaic, chunks: int, dim: int = 0) -> tuple[Mosaic, ...]:
    return _split(mosaic, max(1, -(-mosaic.shape[dim] // chunks)), dim)


def select(mosaic: Mosaic, dim: int, index: int) -> Mosaic:
    """Return the mosaic of one index of a dim, like `Tensor.select`."""
    return _squeeze(_narrow(mosaic, dim, index, 1), dim)


def _unbind(mosaic: Mosaic, dim: int = 0) -> tuple[Mosaic, ...]:
    return tuple(select(mosaic, dim, index) for index in range(mosaic.shape[dim]))


def _permute(mosaic: Mosaic, *dims: int | Sequence[int]) -> Mosaic:
    order = tuple(dim % mosaic.ndim for dim in _unpacked(dims))
    shape = [mosaic.shape[dim] for dim in order]
    return _mosaic(shape, mosaic.dtype, [piece.reordered(order) for piece in mosaic.pieces])


def _transpose(mosaic: Mosaic, dim0: int, dim1: int) -> Mosaic:
    order = list(range(mosaic.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permute(mosaic, *order)


def _t(mosaic: Mosaic) -> Mosaic:
    return mosaic if mosaic.ndim < 2 else _transpose(mosaic, 0, 1)


def _unsqueeze(mosaic: Mosaic, dim: int) -> Mosaic:
    dim %= mosaic.ndim + 1
    shape = (*mosaic.shape[:dim], 1, *mosaic.shape[dim:])
    return _mosaic(shape, mosaic.dtype, [piece.with_dim(dim) for piece in mosaic.pieces])


def _squeeze(mosaic: Mosaic, dim: int | None = None) -> Mosaic:
    dropped = [d for d, size in enumerate(mosaic.shape) if size == 1 and (dim is None or d == dim % mosaic.ndim)]
    kept = [d for d in range(mosaic.ndim) if d not in dropped]
    return _mosaic([mosaic.shape[d] for d in kept], mosaic.dtype, [piece.reordered(kept) for piece in mosaic.pieces])


def _cat(tensors: Sequence[Mosaic], dim: int = 0) -> Mosaic:
    first, dim = tensors[0], dim % tensors[0].ndim
    pieces: list[Piece] = []
    end = 0
    for mosaic in tensors:
        if _changed(mosaic.shape, dim, 0) != _changed(first.shape, dim, 0):
            shapes = " and ".join(str(list(each.shape)) for each in (first, mosaic))
            raise InputError(
                f"tensors of shapes {shapes} cannot be concatenated along dim {dim}", "they may differ only in that dim"
            )
        pieces += [piece.moved(dim, end) for piece in mosaic.pieces]
        end += mosaic.shape[dim]
    return _mosaic(_changed(first.shape, dim, end), first.dtype, pieces)


def _stack(tensors: Sequence[Mosaic], dim: int = 0) -> Mosaic:
    dim %= tensors[0].ndim + 1
    return _cat([_unsqueeze(mosaic, dim) for mosaic in tensors], dim)


def _reshape(mosaic: Mosaic, *shape: int | Sequence[int]) -> Mosaic:
    target = _inferred(_unpacked(shape), mosaic)
    pieces = list(mosaic.pieces) if mosaic.shape.numel() else []
    for first, before, after in reversed(_groups(mosaic.shape, target) if pieces else []):
        pieces = [part for piece in pieces for part in _regrouped(piece, first, before, after)]
    return _mosaic(target, mosaic.dtype, pieces)


def _flatten(mosaic: Mosaic, start_dim: int = 0, end_dim: int = -1) -> Mosaic:
    first, last = start_dim % mosaic.ndim, end_dim % mosaic.ndim
    shape = mosaic.shape
    return _reshape(mosaic, *shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :])


def _unflatten(mosaic: Mosaic, dim: int, sizes: Sequence[int]) -> Mosaic:
    dim %= mosaic.ndim
    known = -math.prod(sizes)
    sizes = [mosaic.shape[dim] // known if size == -1 else size for size in sizes]
    return _reshape(mosaic, *mosaic.shape[:dim], *sizes, *mosaic.shape[dim + 1 :])


def _groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[int, Sequence[int], Sequence[int]]]:
    """Return the smallest groups of neighbouring dims that a reshape changes: the first dim, sizes before and after.

    >>> _groups((4, 6, 5), (4, 2, 15))
    [(0, (4,), (4,)), (1, (6, 5), (2, 15))]
    """
    found = []
    i = j = 0
    while i < len(before) or j < len(after):
        first, second = i, j
        i, j = min(i + 1, len(before)), min(j + 1, len(after))
        while (one := math.prod(before[first:i])) != (other := math.prod(after[second:j])):
            i, j = (i + 1, j) if one < other else (i, j + 1)
        found.append((first, before[first:i], after[second:j]))
    return found


def _regrouped(piece: Piece, first: int, before: Sequence[int], after: Sequence[int]) -> Iterable[Piece]:
    """Return the parts of a piece for the mosaic with one group of dims reshaped."""
    pieces: list[Piece] = [piece if before else piece.with_dim(first)]
    if tuple(before) == tuple(after):
        return pieces
    for count in range(1, len(before)):  # merge all dims of the group, from the last
        dim = first + len(before) - 1 - count
        pieces = [part for each in pieces for part in each.merge_dim(dim, math.prod(before[-count:]))]
    for count in range(1, len(after)):
        dim, inner = first + count - 1, math.prod(after[count:])
        pieces = [part for each in pieces for part in each.split_dim(dim, inner)]
    if not after:
        kept = [dim for dim in range(len(pieces[0].at)) if dim != first]
        pieces = [each.reordered(kept) for each in pieces]
    return pieces


def _inferred(shape: Sequence[int], mosaic: Mosaic) -> tuple[int, ...]:
    """Return the shape with a -1 replaced by the size that fits."""
    total, known = mosaic.shape.numel(), math.prod(size for size in shape if size != -1)
    found = tuple(total // known if size == -1 and known else size for size in shape)
    if math.prod(found) != total:
        raise InputError(f"a tensor of shape {list(mosaic.shape)} cannot be reshaped to {list(shape)}")
    return found


_FUNCTIONS: dict[Callable[..., object], Callable[..., object]] = {
    **dict.fromkeys((torch.Tensor.contiguous, torch.Tensor.clone, torch.clone, torch.Tensor.detach), _unchanged),
    **dict.fromkeys((torch.cat, torch.concat, torch.concatenate), _cat),
    **dict.fromkeys((torch.Tensor.view, torch.Tensor.reshape, torch.reshape), _reshape),
    **dict.fromkeys((torch.Tensor.t, torch.t), _t),
    torch.stack: _stack,
}
_NAMED: dict[str, Callable[..., object]] = {
    "narrow": _narrow,
    "split": _split,
    "chunk": _chunk,
    "select": select,
    "unbind": _unbind,
    "permute": _permute,
    "transpose": _transpose,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "flatten": _flatten,
    "unflatten": _unflatten,
}
for _name, _handler in _NAMED.items():
    _FUNCTIONS[getattr(torch, _name)] = _FUNCTIONS[getattr(torch.Tensor, _name)] = _handler

_METADATA = {
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_meta", "requires_grad")),
    *(torch.Tensor.dim, torch.Tensor.size, torch.Tensor.numel, torch.Tensor.is_floating_point, torch.Tensor.__len__),
}
"""Functions that read metadata, which run on the meta tensor."""


def _unpacked(values: Sequence[Any]) -> Sequence[int]:
    """Return the arguments of a call that takes numbers, or one sequence of them."""
    return values[0] if len(values) == 1 and not isinstance(values[0], int) else values


def _changed(values: Sequence[int], at: int, value: int) -> tuple[int, ...]:
    return (*values[:at], value, *values[at + 1 :])


def _unknown(name: str) -> InputError:
    return InputError(
        f"the conversion between the files and the parameters of this model calls {name!r}, which does not only move "
        "elements",
        "load with from_pretrained of transformers, and distribute with parallelize_module or distribute_module",
    )
