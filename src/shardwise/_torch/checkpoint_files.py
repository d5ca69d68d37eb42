"""What PyTorch's checkpoint reader expects to find in `.metadata`: pickled classes, two of them private."""

from __future__ import annotations

import collections
import dataclasses
import pathlib

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata

__all__ = ["metadata_global", "place_in_file", "with_version"]

_ADMITTED: dict[tuple[str, str], object] = {
    **{
        (metadata.__name__, name): getattr(metadata, name)
        for name in (
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    },
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("collections", "OrderedDict"): collections.OrderedDict,
    **{(module, name): getattr(pathlib, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath",)},
}


def metadata_global(module: str, name: str) -> object:
    """Return the class or object that a `.metadata` file names, or None unless it is one that such files need.

    These are the classes of metadata, sizes, dtypes and paths.
    """
    found = _ADMITTED.get((module, name))
    if found is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
        return getattr(torch, name)
    return found


def place_in_file(file: str, offset: int, length: int) -> filesystem._StorageInfo:
    """Return where PyTorch's reader finds one tensor or object, as a value of `Metadata.storage_data`."""
    return filesystem._StorageInfo(file, offset, length)


def with_version(value: Metadata) -> Metadata:
    """Return the metadata with the version of the file format, if this PyTorch has one."""
    version = getattr(filesystem, "CURRENT_DCP_VERSION", None)
    if version is None or not any(field.name == "version" for field in dataclasses.fields(value)):
        return value
    return dataclasses.replace(value, version=version)
