"""The bytes that `torch.save` writes before and after the elements of a tensor.

PyTorch's checkpoint reader calls `torch.load` for each tensor. The bytes around the elements depend only on dtype and
shape, so they are cached, and the elements are written directly from the tensor's memory.
"""

from __future__ import annotations

import functools
import io
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

ALIGNMENT = 64
"""Archives begin at multiples of this in a file. The elements then do, too: `torch.save` aligns them in the archive."""
_LARGE = 1 << 20


class Archive(NamedTuple):
    """The bytes before and after the elements of a stored tensor."""

    before: bytes
    after: bytes
    nbytes: int

    @property
    def length(self) -> int:
        """The number of bytes, elements included."""
        return len(self.before) + self.nbytes + len(self.after)


@functools.lru_cache(maxsize=4096)
def archive_of(dtype: torch.dtype, shape: tuple[int, ...]) -> Archive:
    """Return the archive of a contiguous tensor."""
    tensor = torch.empty(shape, dtype=dtype)  # if large, its memory is not touched, and so not allocated
    with _without_checksums():
        if tensor.nbytes >= _LARGE:
            gap = _Gap(tensor.nbytes)
            torch.save(tensor, gap)  # type: ignore[arg-type]
            if gap.found:
                return Archive(bytes(gap.before), bytes(gap.after), tensor.nbytes)
        return _small(tensor.zero_())


def saved_object(value: object) -> bytes:
    """Return the bytes that `torch.save` writes for an object."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _small(tensor: torch.Tensor) -> Archive:
    data = saved_object(tensor)
    if not tensor.nbytes:
        return Archive(data, b"", 0)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        record = next(item for item in archive.infolist() if item.filename.endswith("/data/0"))
    # Before each record a zip file repeats its name and extra field, whose lengths may differ from those in infolist.
    name, extra = struct.unpack_from("<HH", data, record.header_offset + 26)
    start = record.header_offset + 30 + name + extra
    assert record.file_size == tensor.nbytes, "torch.save stores the elements uncompressed"
    return Archive(data[:start], data[start + tensor.nbytes :], tensor.nbytes)


class _Gap(io.RawIOBase):
    """A file that stores what is written before and after one write of `nbytes` bytes, the elements."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.nbytes, self.found = nbytes, False
        self.before, self.after = bytearray(), bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: ReadableBuffer) -> int:
        view = memoryview(data)
        if view.nbytes == self.nbytes and not self.found:
            self.found = True
        elif self.found:
            self.after += view
        else:
            self.before += view
        return view.nbytes


@contextmanager
def _without_checksums() -> Iterator[None]:
    """Let `torch.save` skip its CRC of the elements, which PyTorch's readers ignore."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
