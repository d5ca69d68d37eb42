"""Files in blocks with a checksum each, so that whoever reads a part of a file can verify that part.

The checksum of a block is the CRC-32 of the sums of its 512-byte sectors, each taken as 64 little-endian integers
modulo 2**64. The sums run at the speed of memory, many times that of a CRC over all bytes. Any change of one word, and
any exchange of sectors, changes the result.
"""

from __future__ import annotations

import ctypes
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

BLOCK = 1 << 20
"""Bytes of a block. Small enough to stay in a core's cache between copying, summing and writing."""
_SECTOR = 64


def buffer_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, writable. It is valid as long as the tensor."""
    if not tensor.numel():
        return memoryview(bytearray())
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def checksum(block: Tensor) -> int:
    """The checksum of a block of bytes whose length is a multiple of 512."""
    sums = block.view(torch.int64).view(-1, _SECTOR).sum(1)
    return zlib.crc32(buffer_of(sums))


class BlockWriter:
    """Writes a file from the front, a block at a time; `sums` has the checksums of the blocks written."""

    def __init__(self, path: Path, written: Callable[[int], None] = lambda count: None) -> None:
        self._block = torch.zeros(BLOCK, dtype=torch.uint8)
        self._buffer = buffer_of(self._block)
        self._filled = 0
        self._written = written
        self.size = 0
        self.sums: list[int] = []
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def write(self, data: bytes) -> None:
        """Append a few bytes."""
        view = memoryview(data)
        while view:
            count = min(len(view), BLOCK - self._filled)
            self._buffer[self._filled : self._filled + count] = view[:count]
            self._advance(count)
            view = view[count:]

    def write_tensor(self, tensor: Tensor) -> None:
        """Append the elements of a tensor in row-major order; on an accelerator they are copied a block at a time."""
        for piece in contiguous_pieces(tensor):
            flat, start = piece.view(-1).view(torch.uint8), 0
            while start < len(flat):
                count = min(len(flat) - start, BLOCK - self._filled)
                self._block[self._filled : self._filled + count].copy_(flat[start : start + count])
                self._advance(count)
                start += count

    def pad_to(self, size: int) -> None:
        """Append zeros until the file has this size."""
        self.write(bytes(size - self.size))

    def close(self, sync: bool) -> None:
        """Write what is left and close the file; with `sync` it is on the disk afterwards."""
        try:
            if self._filled:
                count = self._filled
                self._buffer[count : _up(count, 8 * _SECTOR)] = bytes(_up(count, 8 * _SECTOR) - count)
                self._flush(count)
            if sync:
                os.fsync(self._file)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close the file in the state it is in."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _advance(self, count: int) -> None:
        self._filled += count
        self.size += count
        if self._filled == BLOCK:
            self._flush(BLOCK)

    def _flush(self, count: int) -> None:
        self.sums.append(checksum(self._block[: _up(count, 8 * _SECTOR)]))
        view = self._buffer[:count]
        while view:
            view = view[os.write(self._file, view) :]
        self._filled = 0
        self._written(count)


class BlockReader:
    """Reads and verifies blocks of a file."""

    def __init__(self, path: Path) -> None:
        self._block = torch.zeros(BLOCK, dtype=torch.uint8)
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def checksum(self, number: int) -> int:
        """The checksum of a block as it is in the file."""
        count = read_into(self._file, self._block, number * BLOCK)
        padded = _up(count, 8 * _SECTOR)
        self._block[count:padded] = 0
        return checksum(self._block[:padded])

    def read(self, into: Tensor, offset: int) -> int:
        """Fill a contiguous tensor from the file; returns the number of bytes that were there."""
        return read_into(self._file, into, offset)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def read_into(file: int, tensor: Tensor, offset: int) -> int:
    """Fill a contiguous CPU tensor from a place in a file; returns the number of bytes that were there."""
    view, done = buffer_of(tensor), 0
    while done < len(view):
        count = os.preadv(file, [view[done:]], offset + done)
        if not count:
            break
        done += count
    return done


def contiguous_pieces(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor as contiguous tensors that follow each other in row-major order; copies are smaller than a block."""
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_contiguous():
        yield tensor
    elif tensor.nbytes <= BLOCK or tensor.ndim == 0:
        yield tensor.contiguous()
    else:
        rows = max(1, len(tensor) * BLOCK // tensor.nbytes)
        for part in tensor.split(rows):
            yield from contiguous_pieces(part.squeeze(0) if len(part) == 1 else part)


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
