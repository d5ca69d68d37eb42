"""Positioned reads and writes between stored tensors and views of local shards.

The elements of a view are contiguous runs of bytes in the file. Each run is one positioned read or write, directly
between the file and the memory of the view if dtype and order agree, otherwise through one buffer. Many runs that are
shorter than a page and close together, such as those of the columns of a matrix, are copied from a mapped window of the
file, which takes a fraction of the time of as many system calls.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import torch
from torch import Tensor

from ..checkpoint.blocks import buffer_of
from ..errors import CheckpointError
from .files import Stored

BUFFER = 16 << 20
"""Size in bytes of the buffer for elements that are cast, transposed, or on an accelerator."""

WINDOW = 4 << 20
"""Size in bytes of the range of a file that is mapped at a time."""

SHORT, CLOSE, MANY = 4096, 4 * 4096, 16
"""Runs are read from a mapped window if at least MANY are shorter than SHORT and at most CLOSE bytes apart."""

Sizes = tuple[int, ...]


class Transfer(NamedTuple):
    """Elements of a stored tensor, and the view of a local shard that holds them, with dims in the file's order."""

    stored: Stored
    offset: int
    """The index of the first element in the stored tensor, counted in row-major order."""
    strides: Sizes
    """For each dim of the view, the distance of neighbours in the file, in elements, in descending order."""
    view: Tensor

    @property
    def nbytes(self) -> int:
        """The number of bytes in the file."""
        return self.view.numel() * self.stored.dtype.itemsize

    @property
    def span(self) -> int:
        """The number of bytes in the file from the first element to the last."""
        last = sum((size - 1) * stride for size, stride in zip(self.view.shape, self.strides, strict=True))
        return (last + 1) * self.stored.dtype.itemsize

    @property
    def place(self) -> tuple[Path, int]:
        """The file, and the byte offset of the first element in it."""
        return self.stored.file, self.stored.offset + self.offset * self.stored.dtype.itemsize


def runs_of(transfer: Transfer) -> tuple[int, Iterable[int]]:
    """Return the length in bytes of the contiguous runs of a transfer, and the byte offset of each in the file."""
    strides, view = transfer.strides, transfer.view
    itemsize, length = transfer.stored.dtype.itemsize, 1
    inner = view.dim()
    while inner and strides[inner - 1] == length:
        inner -= 1
        length *= view.shape[inner]
    _, begin = transfer.place
    steps = [
        range(0, size * stride * itemsize, stride * itemsize)
        for size, stride in zip(view.shape[:inner], strides[:inner], strict=True)
    ]
    if len(steps) < 2:  # the usual case, as a range, since there may be very many runs
        offsets = steps[0] if steps else range(1)
        return length * itemsize, range(begin + offsets.start, begin + offsets.stop, offsets.step)
    return length * itemsize, (begin + sum(index) for index in itertools.product(*steps))


class _Files:
    """File descriptors, opened at first use, and the buffer."""

    flags = os.O_RDONLY

    def __init__(self, done: Callable[[int], None] = lambda count: None) -> None:
        self.bytes = 0
        """The number of bytes that were read or written."""
        self._done = done
        self._open: dict[Path, int] = {}
        self._memory: Tensor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._open.values():
            os.close(file)
        self._open.clear()

    def file(self, path: Path) -> int:
        """Return the descriptor of a file."""
        if path not in self._open:
            self._open[path] = os.open(path, self.flags | os.O_CLOEXEC)
        return self._open[path]

    def buffer(self, size: Sizes, dtype: torch.dtype) -> Tensor:
        """Return a contiguous tensor in the memory of the buffer."""
        if self._memory is None:
            self._memory = torch.empty(BUFFER, dtype=torch.uint8)
        return self._memory[: math.prod(size) * dtype.itemsize].view(dtype).view(size)

    def count(self, nbytes: int) -> None:
        """Count bytes that were read or written."""
        self.bytes += nbytes
        self._done(nbytes)


class Reader(_Files):
    """Reads elements of stored tensors into views of local shards."""

    def read(self, transfer: Transfer) -> None:
        """Fill the view of a transfer from the file."""
        if _has_short_runs(transfer):
            for part in _parts(transfer, WINDOW, lambda part: part.span):
                self._read_mapped(part)
        else:
            self._read_runs(transfer)

    def _read_mapped(self, transfer: Transfer) -> None:
        """Fill a view from a mapped window of the file."""
        stored, offset = transfer.stored, transfer.place[1]
        file, end = self.file(stored.file), offset + transfer.span
        if os.fstat(file).st_size < end:  # reading a page beyond the end of a file would kill the process
            raise _ends_early(stored, os.fstat(file).st_size)
        begin = offset - offset % mmap.ALLOCATIONGRANULARITY
        memory = mmap.mmap(file, end - begin, access=mmap.ACCESS_COPY, offset=begin)
        elements = torch.frombuffer(memory, dtype=stored.dtype, offset=offset - begin)
        transfer.view.copy_(elements.as_strided(transfer.view.shape, transfer.strides))
        del elements
        memory.close()
        self.count(transfer.nbytes)

    def _read_runs(self, transfer: Transfer) -> None:
        """Fill a view by one read for each run."""
        file, stored, preadv = self.file(transfer.stored.file), transfer.stored, os.preadv
        for part in _parts(transfer, BUFFER, lambda part: part.nbytes):
            view = part.view
            direct = _in_file_order(view, stored.dtype)
            target = view if direct else self.buffer(tuple(view.shape), stored.dtype)
            memory = buffer_of(target)
            length, offsets = runs_of(part)
            for low, offset in zip(range(0, len(memory), length), offsets, strict=True):
                run = memory[low : low + length]
                if preadv(file, (run,), offset) != length:  # a short read: read all of it again
                    _read(file, run, offset, stored)
            self.count(len(memory))
            if direct:
                view.view(-1)[:0].zero_()  # increments the version counter
            else:
                view.copy_(target)


class Writer(_Files):
    """Writes views of local shards into stored tensors."""

    flags = os.O_WRONLY

    def write(self, transfer: Transfer) -> None:
        """Write the view of a transfer to the file."""
        file, stored, pwrite = self.file(transfer.stored.file), transfer.stored, os.pwrite
        for part in _parts(transfer, BUFFER, lambda part: part.nbytes):
            view = source = part.view
            if not _in_file_order(view, stored.dtype):
                source = self.buffer(tuple(view.shape), stored.dtype)
                source.copy_(view)
            memory = buffer_of(source)
            length, offsets = runs_of(part)
            for low, offset in zip(range(0, len(memory), length), offsets, strict=True):
                run = memory[low : low + length]
                if pwrite(file, run, offset) != length:
                    _write(file, run, offset)
            self.count(len(memory))

    def sync(self) -> None:
        """Flush the written files to the disk."""
        for file in self._open.values():
            os.fsync(file)


def _in_file_order(view: Tensor, dtype: torch.dtype) -> bool:
    plain = view.device.type == "cpu" and view.dtype == dtype and view.is_contiguous()
    return plain and not (view.is_conj() or view.is_neg())


def _has_short_runs(transfer: Transfer) -> bool:
    """Return whether to copy a transfer from mapped windows of the file."""
    _, offset = transfer.place
    length, _ = runs_of(transfer)
    gaps = [stride * transfer.stored.dtype.itemsize for stride in transfer.strides]
    closest = min((gap for gap in gaps if gap >= length), default=0)
    many = transfer.nbytes >= MANY * length
    return many and length < SHORT and closest <= CLOSE and offset % transfer.stored.dtype.itemsize == 0


def _parts(transfer: Transfer, limit: int, size_of: Callable[[Transfer], int]) -> Iterator[Transfer]:
    """Yield the transfer in parts of at most `limit` bytes, as counted by `size_of`."""
    pending = [transfer]
    while pending:
        stored, offset, strides, view = part = pending.pop()
        if not view.numel():
            continue
        dim = next((dim for dim, size in enumerate(view.shape) if size > 1), None)
        if dim is None or size_of(part) <= limit:
            yield part
            continue
        rows = max(1, view.shape[dim] * limit // size_of(part))
        split = enumerate(view.split(rows, dim))
        parts = [Transfer(stored, offset + i * rows * strides[dim], strides, rest) for i, rest in split]
        pending += parts[::-1]


def _read(file: int, memory: memoryview, offset: int, stored: Stored) -> None:
    while memory:
        count = os.preadv(file, [memory], offset)
        if not count:
            raise _ends_early(stored, offset)
        memory, offset = memory[count:], offset + count


def _ends_early(stored: Stored, offset: int) -> CheckpointError:
    return CheckpointError(
        f"{stored.file} ends at byte {offset}, inside a tensor of shape {list(stored.shape)}",
        "save or download the file again",
    )


def _write(file: int, memory: memoryview, offset: int) -> None:
    while memory:
        count = os.pwrite(file, memory, offset)
        memory, offset = memory[count:], offset + count
