"""Plan what to read for a state, and check that the checkpoint fits it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from ..errors import CheckpointError
from ..tensor.checkpoint import Chunk
from .held import chunks_of, shape_of
from .index import OTHER_FILES
from .ranks import Ranks
from .state import FlatState
from .stored import Place, Stored


class Read(NamedTuple):
    """A box of a stored chunk, and the tensor of the state that it is read into."""

    place: Place
    dtype: torch.dtype
    chunk: tuple[int, ...]
    """The sizes of the stored chunk."""
    begin: tuple[int, ...]
    target: Tensor

    def span(self) -> tuple[int, int]:
        """Return the range of bytes in the file from the first to the last element."""
        if self.place.data is None:
            return self.place.start, self.place.start + self.place.length
        first = last = 0
        for size, begin, length in zip(self.chunk, self.begin, self.target.shape, strict=True):
            first, last = first * size + begin, last * size + begin + length - 1
        item = self.dtype.itemsize
        return self.place.data + first * item, self.place.data + (last + 1) * item


class Reads(NamedTuple):
    """All reads of this process."""

    tensors: list[Read]
    objects: dict[str, Place]
    written: list[Tensor]
    """The tensors of the state that change."""

    def blocks(self, stored: Stored) -> set[tuple[str, int]]:
        """Return the blocks to read, as pairs of a file and the number of a block in it."""
        found: set[tuple[str, int]] = set()
        for read in self.tensors:
            found.update(stored.blocks(read.place, *read.span()))
        for place in self.objects.values():
            found.update(stored.blocks(place, place.start, place.start + place.length))
        return found


def plan_reads(state: FlatState, stored: Stored, ranks: Ranks, strict: bool, cast: bool) -> Reads:
    """Return what to read. Raise one error that lists all values of the state that do not fit the checkpoint."""
    reads = Reads([], {}, [])
    problems, advice = [], set()
    for name, value in state.values.items():
        known = stored.described.get(name)
        if known is None:
            if strict:
                problems.append(f"{name!r}: expected {_text(value)}, found nothing of this name")
                advice.add("; strict=False leaves values unchanged that are missing in the checkpoint")
        elif isinstance(value, Tensor) != isinstance(known, TensorStorageMetadata):
            problems.append(f"{name!r}: expected {_text(value)}, found {_stored_text(known)}")
        elif not isinstance(value, Tensor) or not isinstance(known, TensorStorageMetadata):
            reads.objects[name] = stored.place(MetadataIndex(name))
        elif shape_of(value) != tuple(known.size) or (value.dtype != known.properties.dtype and not cast):
            problems.append(f"{name!r}: expected {_text(value)}, found {_stored_text(known)}")
            if shape_of(value) == tuple(known.size):
                advice.add("; cast=True converts dtypes")
        else:
            reads.written.append(value)
            for chunks in chunks_of(name, value, ranks).values():
                for chunk in chunks:
                    reads.tensors.extend(_reads(name, chunk, known, stored))
    if problems:
        raise CheckpointError(
            f"{len(problems)} of {len(state.values)} values do not fit {stored.folder}:\n  " + "\n  ".join(problems),
            "nothing of the state was changed" + "".join(sorted(advice)),
        )
    return reads


def _reads(name: str, chunk: Chunk, known: TensorStorageMetadata, stored: Stored) -> Iterator[Read]:
    """Yield the boxes of stored chunks that make up a chunk of the state."""
    covered = 0
    for number, box in enumerate(known.chunks):
        starts = [max(a, b) for a, b in zip(chunk.offset, box.offsets, strict=True)]
        stops = [min(a + n, b + m) for a, n, b, m in zip(chunk.offset, chunk.size, box.offsets, box.sizes, strict=True)]
        if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
            continue
        target = chunk.data.detach()
        for dim, (start, stop, first) in enumerate(zip(starts, stops, chunk.offset, strict=True)):
            target = target.narrow(dim, start - first, stop - start)
        covered += math.prod(target.shape)
        place = stored.place(MetadataIndex(name, box.offsets, number))
        begin = tuple(start - first for start, first in zip(starts, box.offsets, strict=True))
        read = Read(place, known.properties.dtype, tuple(box.sizes), begin, target)
        if place.data is not None and read.span()[1] > place.start + place.length:
            raise CheckpointError(
                f"{name!r} in {stored.folder}: its metadata names more bytes than are stored", OTHER_FILES
            )
        yield read
    if covered != math.prod(chunk.size):
        raise CheckpointError(
            f"{name!r} in {stored.folder} is incomplete: expected {math.prod(chunk.size)} elements at "
            f"{list(chunk.offset)}, found {covered}",
            OTHER_FILES,
        )


def _text(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(shape_of(value))}"
    return f"a value of type {type(value).__name__}"


def _stored_text(known: object) -> str:
    if isinstance(known, TensorStorageMetadata):
        return f"{str(known.properties.dtype).removeprefix('torch.')}{list(known.size)}"
    return "a value that is no tensor"
