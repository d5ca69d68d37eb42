"""Files in blocks with a checksum each, so that a reader of a part of a file can verify that part.

The checksum of a block is the CRC-32 of the sums of its 512-byte sectors. A sum is that of 64 little-endian integers,
modulo 2**64, which runs at the speed of memory, many times that of a CRC over all bytes. A changed word and exchanged
sectors change the sums, which the CRC misses once in 2**32 times; an exchange of words in one sector is not noticed.
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
_WRITEBACK = 8 * BLOCK
"""The number of bytes between two requests to start writing them to the disk."""


def _start_writeback_function() -> Callable[[int, int, int], object]:
    """Return Linux's `sync_file_range`, which starts to write a range of a file to the disk without waiting."""
    try:
        function = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError, TypeError):  # another operating system
        return lambda file, offset, count: None
    function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    write = 2  # SYNC_FILE_RANGE_WRITE
    return lambda file, offset, count: function(file, offset, count, write)


start_writeback = _start_writeback_function()


def buffer_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor, writable, valid as long as the tensor is."""
    if not tensor.numel():
        return memoryview(bytearray())
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def checksum(block: Tensor) -> int:
    """Return the checksum of a block of bytes whose length is a multiple of 512."""
    sums = block.view(torch.int64).view(-1, _SECTOR).sum(1)
    return zlib.crc32(buffer_of(sums))


class BlockWriter:
    """Writes a file sequentially, one block at a time; `sums` holds the checksums of the blocks written so far.

    With `sync`, data is sent to the disk from the first megabytes on, so that `fsync` in `close` has little left to do.
    """

    def __init__(self, path: Path, sync: bool = False, written: Callable[[int], None] = lambda count: None) -> None:
        self._block = torch.zeros(BLOCK, dtype=torch.uint8)
        self._buffer = buffer_of(self._block)
        self._filled = 0
        self._sync = sync
        self._written = written
        self._flushed = 0
        self._requested = 0
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
        """Append the elements of a tensor in row-major order.

        Blocks inside one contiguous CPU tensor are written from its memory. Others are copied into the writer's block
        first.
        """
        for piece in contiguous_pieces(tensor):
            flat, start = piece.view(-1).view(torch.uint8), 0
            readable = flat.device.type == "cpu" and flat.data_ptr() % 8 == 0 and flat.storage_offset() % 8 == 0
            while start < len(flat):
                if not self._filled and len(flat) - start >= BLOCK and readable and start % 8 == 0:
                    self.size += BLOCK
                    self._flush(flat[start : start + BLOCK], BLOCK)
                    start += BLOCK
                    continue
                count = min(len(flat) - start, BLOCK - self._filled)
                self._block[self._filled : self._filled + count].copy_(flat[start : start + count])
                self._advance(count)
                start += count

    def pad_to(self, size: int) -> None:
        """Append zeros until the file has this size."""
        self.write(bytes(size - self.size))

    def close(self) -> None:
        """Write the last block and close the file; with `sync` it is on the disk afterwards."""
        try:
            if self._filled:
                count = self._filled
                self._buffer[count : _up(count, 8 * _SECTOR)] = bytes(_up(count, 8 * _SECTOR) - count)
                self._flush(self._block, count)
            if self._sync:
                os.fsync(self._file)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close the file without writing the rest."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _advance(self, count: int) -> None:
        self._filled += count
        self.size += count
        if self._filled == BLOCK:
            self._flush(self._block, BLOCK)

    def _flush(self, block: Tensor, count: int) -> None:
        """Write the first `count` bytes of a block. Bytes after them, up to a multiple of 512, must be zero."""
        self.sums.append(checksum(block[: _up(count, 8 * _SECTOR)]))
        view = buffer_of(block)[:count]
        while view:
            view = view[os.write(self._file, view) :]
        self._filled = 0
        self._flushed += count
        if self._sync and self._flushed - self._requested >= _WRITEBACK:
            start_writeback(self._file, self._requested, self._flushed - self._requested)
            self._requested = self._flushed
        self._written(count)


class BlockReader:
    """Reads a file block by block, and returns checksums."""

    def __init__(self, path: Path) -> None:
        self._block = torch.zeros(BLOCK, dtype=torch.uint8)
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def checksum(self, number: int) -> int:
        """Return the checksum of a block of the file."""
        count = read_into(self._file, self._block, number * BLOCK)
        padded = _up(count, 8 * _SECTOR)
        self._block[count:padded] = 0
        return checksum(self._block[:padded])

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def read_into(file: int, tensor: Tensor, offset: int) -> int:
    """Fill a contiguous CPU tensor from an offset in a file, and return the number of bytes that were there."""
    view, done = buffer_of(tensor), 0
    while done < len(view):
        count = os.preadv(file, [view[done:]], offset + done)
        if not count:
            break
        done += count
    return done


def contiguous_pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a tensor as contiguous tensors, in row-major order. Those that must be copied are at most about a block."""
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
