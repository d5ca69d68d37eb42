"""The index of a checkpoint, `shardwise.json`: sizes and checksums of its files, and its own checksum.

PyTorch's tools ignore the file. It adds to `.metadata` the checksums of the blocks of every file, and the offset at
which the elements of each tensor begin, so that any part of a tensor can be read on its own.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import CheckpointError
from .blocks import BLOCK

INDEX = "shardwise.json"
METADATA = ".metadata"
OTHER_FILES = "load an earlier checkpoint, or copy the files of this one again"
"""What to do about files that are missing, damaged or foreign."""
_FORMAT = "shardwise checkpoint"
_VERSION = 1


class FileRecord(NamedTuple):
    """Size of a file, checksums of its blocks, and the offsets of elements in its archives."""

    size: int
    sums: list[int]
    data: dict[int, int]
    """The offset of the first element of each archive, by the offset of the archive in the file."""


class Index(NamedTuple):
    """The index of a checkpoint."""

    order: int
    """The number of the checkpoint among those in its parent folder, in the order of completion."""
    block: int
    metadata_size: int
    metadata_crc32: int
    files: dict[str, FileRecord]


def index_text(index: Index) -> str:
    """Return the index as the text of its file."""
    content = {
        "format": _FORMAT,
        "version": _VERSION,
        "order": index.order,
        "block": index.block,
        "metadata": [index.metadata_size, index.metadata_crc32],
        "files": {
            name: {
                "size": record.size,
                "sums": "".join(f"{s:08x}" for s in record.sums),
                "data": [*record.data.items()],
            }
            for name, record in index.files.items()
        },
    }
    body = json.dumps(content, separators=(",", ":"), sort_keys=True)
    head = {"crc32": zlib.crc32(body.encode()), "order": index.order}  # a short line, which `order_of` reads
    return json.dumps(head) + "\n" + body + "\n"


def read_index(folder: Path) -> Index | None:
    """Return the index of a checkpoint, or None if PyTorch wrote it; raise an error if it is damaged."""
    path = folder / INDEX
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    content = _content(path, text)
    if content.get("format") != _FORMAT or not isinstance(content.get("version"), int):
        raise CheckpointError(
            f"{path} is foreign: expected an index of format {_FORMAT!r}, found {content!r:.80}", OTHER_FILES
        )
    if content["version"] > _VERSION or content["block"] != BLOCK:
        raise CheckpointError(
            f"{path} has version {content['version']}, and this shardwise reads version {_VERSION}", "update shardwise"
        )
    files = {
        name: FileRecord(
            record["size"],
            [int(record["sums"][at : at + 8], 16) for at in range(0, len(record["sums"]), 8)],
            dict(record["data"]),
        )
        for name, record in content["files"].items()
    }
    size, crc32 = content["metadata"]
    return Index(content["order"], content["block"], size, crc32, files)


def _content(path: Path, text: bytes) -> dict[str, Any]:
    head, _, body = text.partition(b"\n")
    body = body.removesuffix(b"\n")
    try:
        expected, content = json.loads(head)["crc32"], json.loads(body)
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(
            f"{path} is damaged: expected two lines of JSON, found {text[:60]!r}", OTHER_FILES
        ) from None
    if zlib.crc32(body) != expected:
        raise CheckpointError(
            f"{path} is damaged: expected checksum {expected:08x}, found {zlib.crc32(body):08x}", OTHER_FILES
        )
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is foreign: expected an object, found {content!r:.80}", OTHER_FILES)
    return content


def order_of(folder: Path) -> int:
    """Return the number of a checkpoint, or 0 if its index cannot be read."""
    try:
        with open(folder / INDEX, "rb") as file:
            return int(json.loads(file.readline(200))["order"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0
