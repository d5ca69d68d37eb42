"""Reading parts of stored tensors directly into the memory of the state."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from ..errors import CheckpointError
from .blocks import read_into
from .index import OTHER_FILES
from .reads import Read
from .stored import Place

_SCRATCH = 1 << 20
_LONG_RUN = 1 << 16
"""If at least this many bytes of each row are needed, only those are read. Otherwise complete rows are read."""


def read_tensors(folder: Path, reads: Iterable[Read], done: Callable[[int], None]) -> None:
    """Fill the targets, and read each file from front to back. `done` is called with the bytes of each target."""
    reads = list(reads)
    on_gpu = any(read.target.device.type == "cuda" for read in reads)
    scratch = torch.empty(_SCRATCH, dtype=torch.uint8, pin_memory=on_gpu)
    file, opened = "", -1
    try:
        for read in sorted(reads, key=lambda read: (read.place.file, read.span())):
            if read.place.file != file:
                if opened >= 0:
                    os.close(opened)
                file, opened = read.place.file, os.open(folder / read.place.file, os.O_RDONLY | os.O_CLOEXEC)
            if read.place.data is None:
                _load_archive(folder, opened, read)
            else:
                _Reading(folder / file, opened, read.dtype, scratch).box(
                    read.place.data, read.chunk, read.begin, read.target
                )
            done(read.target.nbytes)
    finally:
        if opened >= 0:
            os.close(opened)


def read_bytes(folder: Path, place: Place) -> bytes:
    """Return the bytes at a place."""
    with open(folder / place.file, "rb") as file:
        file.seek(place.start)
        return file.read(place.length)


def _load_archive(folder: Path, file: int, read: Read) -> None:
    """Fill a target from a checkpoint that PyTorch wrote: its archive is loaded without pickle."""
    data = os.pread(file, read.place.length, read.place.start)
    try:
        found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{folder / read.place.file} is damaged at byte {read.place.start}: {error}", OTHER_FILES
        ) from error
    for dim, (begin, length) in enumerate(zip(read.begin, read.target.shape, strict=True)):
        found = found.narrow(dim, begin, length)
    read.target.copy_(found)


class _Reading:
    """Reads boxes of row-major arrays in one file."""

    def __init__(self, path: Path, file: int, dtype: torch.dtype, scratch: Tensor) -> None:
        self.path, self.file, self.dtype, self.scratch = path, file, dtype, scratch

    def box(self, at: int, sizes: tuple[int, ...], begin: tuple[int, ...], target: Tensor) -> None:
        """Read the box of the target's shape that begins at `begin` in an array of these sizes at offset `at`."""
        row = math.prod(sizes[1:]) * self.dtype.itemsize
        if tuple(target.shape[1:]) == sizes[1:]:
            self.run(at + (begin[0] * row if begin else 0), target)
        elif row <= _SCRATCH and math.prod(target.shape[1:]) * self.dtype.itemsize < _LONG_RUN:
            self._rows(at + begin[0] * row, row, sizes[1:], begin[1:], target)
        else:
            for index in range(target.shape[0]):
                self.box(at + (begin[0] + index) * row, sizes[1:], begin[1:], target[index])

    def run(self, at: int, target: Tensor) -> None:
        """Read consecutive elements."""
        if target.is_contiguous() and target.device.type == "cpu" and target.dtype == self.dtype:
            self._fill(target, at)
            return
        nbytes = target.numel() * self.dtype.itemsize
        if nbytes <= _SCRATCH:
            target.copy_(self._scratch(at, nbytes).view(self.dtype).view(target.shape))
            return
        rows = max(1, len(target) * _SCRATCH // nbytes)
        for part in target.split(rows):
            self.run(at, part.squeeze(0) if len(part) == 1 and part.ndim > 1 else part)
            at += part.numel() * self.dtype.itemsize

    def _rows(self, at: int, row: int, sizes: tuple[int, ...], begin: tuple[int, ...], target: Tensor) -> None:
        """Read complete rows, and copy the needed columns of each."""
        for part in target.split(max(1, _SCRATCH // row)):
            found = self._scratch(at, len(part) * row).view(self.dtype).view(len(part), *sizes)
            for dim, (start, length) in enumerate(zip(begin, target.shape[1:], strict=True), 1):
                found = found.narrow(dim, start, length)
            part.copy_(found)
            at += len(part) * row

    def _scratch(self, at: int, nbytes: int) -> Tensor:
        found = self.scratch[:nbytes]
        self._fill(found, at)
        return found

    def _fill(self, into: Tensor, at: int) -> None:
        count = read_into(self.file, into, at)
        if count != into.nbytes:
            raise CheckpointError(
                f"{self.path} is truncated: expected {into.nbytes} bytes at {at}, found {count}", OTHER_FILES
            )
