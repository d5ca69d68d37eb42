"""Names in the result of a transfer: tensors are renamed, left out, or concatenated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..comm.boxes import Segment
from ..errors import InputError, ShapeError

__all__ = ["Convert", "Made", "Part", "Piece", "made_from", "target_name"]


@dataclass(frozen=True, order=True)
class Part:
    """Part `index` of the tensor `name`, whose parts are concatenated along `dim`.

    >>> Part("layers.0.qkv.weight", 1)                # rows of k, after those of q (part 0), before those of v (part 2)

    With `groups=2`, parts are divided into halves, and the result is `[q0; k0; v0; q1; k1; v1]`. With as many groups as
    tp has ranks, `Shard(0)` over tp gives each rank its rows of q, k and v, also if their numbers of rows differ.
    """

    name: str
    index: int
    dim: int = 0
    groups: int = 1


Convert = Callable[[str], "str | Part | tuple[str, int] | None"]
"""Maps the name of a source tensor to that of a target tensor, or to a part of it; None leaves the tensor out."""


class Piece(NamedTuple):
    """A source tensor, and the segment that it and the target tensor have in common (None: all of both)."""

    source: str
    segment: Segment | None


class Made(NamedTuple):
    """A tensor of the target: its shape and dtype, and the pieces of source tensors that it consists of."""

    shape: torch.Size
    dtype: torch.dtype
    pieces: tuple[Piece, ...]


def made_from(shapes: Mapping[str, tuple[torch.Size, torch.dtype]], convert: Convert | None) -> dict[str, Made]:
    """Return the tensors of the target by name, from the shapes and dtypes of the source tensors."""
    parts: dict[str, list[tuple[Part, str]]] = {}
    for source in shapes:
        target = source if convert is None else convert(source)
        if target is not None:
            part = _as_part(target)
            parts.setdefault(part.name, []).append((part, source))
    return {name: _made(name, sorted(parts[name]), shapes) for name in sorted(parts)}


def _as_part(target: str | Part | tuple[str, int]) -> Part:
    if isinstance(target, str):
        return Part(target, 0)
    return target if isinstance(target, Part) else Part(*target)


def target_name(target: str | Part | tuple[str, int]) -> str:
    """Return the name of the target tensor from the result of a `convert` function."""
    return _as_part(target).name


def _made(name: str, parts: list[tuple[Part, str]], shapes: Mapping[str, tuple[torch.Size, torch.dtype]]) -> Made:
    sources = [source for _, source in parts]
    if [part.index for part, _ in parts] != list(range(len(parts))):
        found = ", ".join(f"{source} as part {part.index}" for part, source in parts)
        raise InputError(
            f"the parts of {name!r} are {found}", "number the parts of a tensor 0, 1, 2, ..., each of them once"
        )
    dtypes = {shapes[source][1] for source in sources}
    if len(dtypes) > 1:
        raise InputError(
            f"{name!r} is made from {', '.join(sources)}, of dtypes {', '.join(sorted(map(str, dtypes)))}",
            "give parts of one dtype",
        )
    if len(parts) == 1 and parts[0][0].groups == 1:
        return Made(*shapes[sources[0]], (Piece(sources[0], None),))
    return _joined(name, [part for part, _ in parts], sources, [shapes[source][0] for source in sources], dtypes.pop())


def _joined(
    name: str, parts: Sequence[Part], sources: Sequence[str], shapes: Sequence[torch.Size], dtype: torch.dtype
) -> Made:
    first = shapes[0]
    dim, groups = parts[0].dim, parts[0].groups
    texts = ", ".join(f"{source} {list(shape)}" for source, shape in zip(sources, shapes, strict=True))
    if {(part.dim, part.groups) for part in parts} != {(dim, groups)} or not 0 <= dim < len(first):
        raise InputError(
            f"the parts of {name!r} ({texts}) cannot be concatenated as {list(parts)}",
            "give all of them the same `groups`, and the same `dim`, which their tensors have",
        )
    if any((*shape[:dim], *shape[dim + 1 :]) != (*first[:dim], *first[dim + 1 :]) for shape in shapes):
        raise ShapeError(
            f"the parts of {name!r} along dim {dim} cannot be concatenated: {texts}", "they may differ only in that dim"
        )
    sizes = [shape[dim] for shape in shapes]
    if any(size % groups for size in sizes):
        raise ShapeError(
            f"the parts of {name!r} cannot be divided into {groups} groups: {texts}",
            f"use a number of groups that divides the size of dim {dim} of each",
        )
    total = sum(sizes)
    shape = torch.Size((*first[:dim], total, *first[dim + 1 :]))
    return Made(shape, dtype, tuple(_pieces(sources, sizes, dim, groups)))


def _pieces(sources: Sequence[str], sizes: Sequence[int], dim: int, groups: int) -> Iterable[Piece]:
    start = 0
    for source, size in zip(sources, sizes, strict=True):
        piece = size // groups
        for group in range(groups):
            yield Piece(source, Segment(dim, group * piece, group * (sum(sizes) // groups) + start, piece))
        start += piece
