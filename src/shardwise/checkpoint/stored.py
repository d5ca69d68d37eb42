"""An opened checkpoint: its tensors and objects, their places in files, and the checks of these files."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from ..errors import CheckpointError
from .blocks import BLOCK, BlockReader
from .index import METADATA, OTHER_FILES, Index, read_index
from .metadata import read_metadata


class Place(NamedTuple):
    """The place of a tensor or object in a file; `data` is the offset of its first element, if the index has it."""

    file: str
    start: int
    length: int
    data: int | None


class Stored:
    """An opened checkpoint. File sizes are checked when it is opened."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index = read_index(folder)
        self.metadata = self._read_metadata(self.index)
        if self.index is not None:
            for name, record in self.index.files.items():
                self._check_size(name, record.size, exactly=True)
        else:
            ends: dict[str, int] = {}
            for place in self.metadata.storage_data.values():
                ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
            for name, end in ends.items():
                self._check_size(name, end, exactly=False)

    @property
    def described(self) -> dict[str, TensorStorageMetadata | BytesStorageMetadata]:
        """The metadata of each tensor and object, by name."""
        return self.metadata.state_dict_metadata

    def place(self, index: MetadataIndex) -> Place:
        """Return the place of a chunk or an object."""
        found: Any = self.metadata.storage_data.get(index)
        if found is None:
            raise CheckpointError(
                f"{self.folder / METADATA} has no place for {index.fqn!r} at {index.offset}", OTHER_FILES
            )
        if getattr(found, "transform_descriptors", None):
            raise CheckpointError(
                f"{index.fqn!r} in {self.folder} was transformed by {found.transform_descriptors}",
                "load it with torch.distributed.checkpoint and the extensions that wrote it",
            )
        data = None
        if self.index is not None:
            record = self.index.files.get(found.relative_path)
            if record is None:
                raise CheckpointError(
                    f"{found.relative_path} in {self.folder} is foreign: it is not in the index", OTHER_FILES
                )
            data = record.data.get(found.offset)
        return Place(found.relative_path, found.offset, found.length, data)

    def blocks(self, place: Place, start: int, stop: int) -> Iterable[tuple[str, int]]:
        """Return the blocks that hold a range of a file."""
        return ((place.file, number) for number in range(start // BLOCK, -(-stop // BLOCK)))

    def verify(self, blocks: Iterable[tuple[str, int]]) -> None:
        """Raise an error if the checksum of a block differs from the one in the index."""
        if self.index is None:
            return
        file, reader = "", None
        try:
            for name, number in sorted(blocks):
                if name != file or reader is None:
                    if reader is not None:
                        reader.close()
                    file, reader = name, BlockReader(self.folder / name)
                expected, found = self.index.files[name].sums[number], reader.checksum(number)
                if expected != found:
                    raise CheckpointError(
                        f"{self.folder / name} is damaged at bytes {number * BLOCK} to {(number + 1) * BLOCK}: "
                        f"expected checksum {expected:08x}, found {found:08x}",
                        "load an earlier checkpoint; nothing of the state was changed",
                    )
        finally:
            if reader is not None:
                reader.close()

    def _read_metadata(self, index: Index | None) -> Metadata:
        path = self.folder / METADATA
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing: expected the metadata of a checkpoint", OTHER_FILES) from None
        if index is not None:
            _check(f"{path} is damaged", "size", index.metadata_size, len(data))
            _check(f"{path} is damaged", "checksum", index.metadata_crc32, zlib.crc32(data))
        return read_metadata(path, data)

    def _check_size(self, name: str, expected: int, exactly: bool) -> None:
        path = self.folder / name
        if Path(name).name != name:
            raise CheckpointError(f"{self.folder / METADATA} names a file outside its folder: {name!r}", OTHER_FILES)
        try:
            found = path.stat().st_size
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing: expected a file of {expected} bytes", OTHER_FILES) from None
        if found < expected:
            raise CheckpointError(f"{path} is truncated: expected {expected} bytes, found {found}", OTHER_FILES)
        if exactly and found > expected:
            raise CheckpointError(f"{path} is foreign: expected {expected} bytes, found {found}", OTHER_FILES)


def _check(what: str, kind: str, expected: int, found: int) -> None:
    if expected != found:
        raise CheckpointError(f"{what}: expected {kind} {expected}, found {found}", OTHER_FILES)
