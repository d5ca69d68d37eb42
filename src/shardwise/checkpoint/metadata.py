"""`.metadata`, the pickle from which PyTorch's tools read a checkpoint.

It is read by an unpickler that knows only the classes of metadata. Any other name in the file, such as that of a
function to call, raises an error before it is looked up.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import NoReturn

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from .._torch.checkpoint_files import metadata_global, place_in_file, with_version
from ..errors import CheckpointError
from .index import OTHER_FILES
from .plan import Contents
from .write import WrittenFile


def metadata_of(contents: Contents, written: list[WrittenFile]) -> Metadata:
    """Return the metadata of a checkpoint."""
    tensors = {
        name: TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), [])
        for name, (dtype, shape) in contents.tensors.items()
    }
    places: dict[MetadataIndex, object] = {}
    for plan in contents.plans:
        for piece, start, length, _ in plan.entries:
            chunks = tensors[piece.name].chunks
            places[MetadataIndex(piece.name, piece.offset, len(chunks))] = place_in_file(plan.file, start, length)
            chunks.append(ChunkStorageMetadata(torch.Size(piece.offset), torch.Size(piece.size)))
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {**tensors}
    for file in written:
        for name, (start, length) in file.objects.items():
            described[name] = BytesStorageMetadata()
            places[MetadataIndex(name)] = place_in_file(file.name, start, length)
    ordered = {name: described[name] for name in contents.paths if name in described}
    return with_version(Metadata(ordered, planner_data=contents.paths, storage_data=places, storage_meta=StorageMeta()))


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        found = metadata_global(module, name)
        if found is None:
            raise CheckpointError(
                f"it names {module}.{name}, which is no part of metadata and could run code; the file was not loaded"
            )
        return found

    def persistent_load(self, key: object) -> NoReturn:
        raise CheckpointError("it refers to objects outside the file")


def read_metadata(path: Path, data: bytes) -> Metadata:
    """Return the metadata in the bytes of a `.metadata` file."""
    try:
        found = _MetadataUnpickler(io.BytesIO(data)).load()
    except CheckpointError as error:
        raise CheckpointError(f"{path} is refused: {error.problem}", OTHER_FILES) from None
    except Exception as error:  # a damaged pickle raises whatever its opcodes meet
        raise CheckpointError(
            f"{path} is damaged: expected pickled metadata, found {type(error).__name__}: {error}", OTHER_FILES
        ) from None
    if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
        raise CheckpointError(
            f"{path} is foreign: expected the metadata of a checkpoint, found {type(found).__name__}", OTHER_FILES
        )
    return found
