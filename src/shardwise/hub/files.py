"""Safetensors files: headers and layout, in one file or in several with an index.

A file begins with the length of its header (8 bytes), then the header (JSON: dtype, shape and place of each tensor),
then the tensors, row-major, without gaps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..errors import CheckpointError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_LONGEST_HEADER = 100_000_000
_OTHER_FILES = "download or save the files of the model again, or pass the folder that has them"
_NAMES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_DTYPES = {dtype: name for name, dtype in _NAMES.items()}
# Tensors are stored by dtype, in this order, and then by name, so that each begins at a multiple of its element size.
_ORDER = [
    *("U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16"),
    *("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"),
]


class Stored(NamedTuple):
    """A tensor in a file."""

    file: Path
    offset: int
    """The offset of its first byte in the file."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


class Described(NamedTuple):
    """Shape and dtype of a tensor to store."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


class Contents(NamedTuple):
    """The tensors in the files of a folder by name, and the number of bytes of headers and index."""

    tensors: dict[str, Stored]
    header_bytes: int


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_folder(folder: Path) -> Contents:
    """Read the headers of the files in a folder: those that its index names, or the only one."""
    index = folder / INDEX
    if index.is_file():
        weight_map = _json(index, index.read_bytes()).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise CheckpointError(f"{index} has no 'weight_map' from tensors to files", _OTHER_FILES)
        return _several(folder, index, weight_map)
    single = folder / WEIGHTS
    if not single.is_file():
        there = ", ".join(sorted(path.name for path in folder.iterdir())[:12]) if folder.is_dir() else "no such folder"
        raise CheckpointError(f"{folder} has neither {WEIGHTS} nor {INDEX}, but: {there or 'nothing'}", _OTHER_FILES)
    return read_file(single)


def _several(folder: Path, index: Path, weight_map: Mapping[str, str]) -> Contents:
    found: dict[str, Stored] = {}
    total = index.stat().st_size
    for name in sorted(set(weight_map.values())):
        if Path(name).name != name:
            raise CheckpointError(f"{index} names the file {name!r}, which is not in its folder", _OTHER_FILES)
        tensors, count = read_file(folder / name)
        total += count
        found |= tensors
    lacking = sorted(set(weight_map) - set(found))
    if lacking:
        raise CheckpointError(f"{index} names tensors that no file has: {', '.join(lacking)}", _OTHER_FILES)
    return Contents(found, total)


def read_file(path: Path) -> Contents:
    """Read the header of a file, and check it against the length of the file."""
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist, but the index names it", "download the file again")
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > min(_LONGEST_HEADER, size - 8):
            raise CheckpointError(
                f"{path} is no safetensors file: it has {size} bytes, and a header of {length}", _OTHER_FILES
            )
        header = _json(path, file.read(length))
    end = 8 + length
    tensors = {name: _stored(path, name, entry, end, size) for name, entry in header.items() if name != "__metadata__"}
    return Contents(tensors, end)


def _stored(path: Path, name: str, entry: Any, begin: int, size: int) -> Stored:
    try:
        dtype, shape = _NAMES[entry["dtype"]], tuple(map(int, entry["shape"]))
        low, high = map(int, entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: the entry of {name!r} in the header is {entry!r}: expected a known dtype, shape and data_offsets",
            _OTHER_FILES,
        ) from error
    stored = Stored(path, begin + low, shape, dtype)
    if min(shape, default=0) < 0 or low < 0 or high - low != stored.nbytes:
        kind = f"{entry['dtype']}{list(shape)}"
        raise CheckpointError(f"{path} is damaged: {name!r} is {kind}, and has the bytes {low} to {high}", _OTHER_FILES)
    if begin + high > size:
        raise CheckpointError(
            f"{path} is truncated: {name!r} ends at byte {begin + high}, the file at {size}", _OTHER_FILES
        )
    return stored


def _json(path: Path, data: bytes) -> dict[str, object]:
    try:
        found = json.loads(data)
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: its header or index is no JSON ({error})", _OTHER_FILES) from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is damaged: its header or index is no JSON object", _OTHER_FILES)
    return found


# ---- laying out ------------------------------------------------------------------------------------------------------


class NewFile(NamedTuple):
    """A file to be written: its header, and its total length."""

    name: str
    header: bytes
    length: int


def lay_out(
    folder: Path, tensors: Mapping[str, Described], largest: int, parameters: int
) -> tuple[dict[str, Stored], list[NewFile], bytes | None]:
    """Return the place of each tensor, the files, and the index if there are several files.

    Tensors fill files of at most `largest` bytes in the order given; a larger tensor is alone in a file.
    """
    groups: list[dict[str, Described]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        if groups[-1] and filled + tensor.nbytes > largest:
            groups.append({})
            filled = 0
        groups[-1][name] = tensor
        filled += tensor.nbytes
    count = len(groups)
    names = [WEIGHTS] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    places: dict[str, Stored] = {}
    files = []
    for name, group in zip(names, groups, strict=True):
        file, stored = _new_file(folder / name, group)
        files.append(file)
        places |= stored
    if count == 1:
        return places, files, None
    total = sum(tensor.nbytes for tensor in tensors.values())
    weight_map = {name: stored.file.name for name, stored in places.items()}
    index = {"metadata": {"total_parameters": parameters, "total_size": total}, "weight_map": weight_map}
    return places, files, (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


def _new_file(path: Path, tensors: Mapping[str, Described]) -> tuple[NewFile, dict[str, Stored]]:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts: dict[str, int] = {}
    end = 0
    for name in sorted(tensors, key=lambda name: (_ORDER.index(_code(name, tensors[name].dtype)), name)):
        shape, dtype = tensors[name]
        starts[name], stop = end, end + tensors[name].nbytes
        entries[name] = {"dtype": _code(name, dtype), "shape": list(shape), "data_offsets": [end, stop]}
        end = stop
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    stored = {name: Stored(path, len(header) + starts[name], *tensors[name]) for name in starts}
    return NewFile(path.name, header, len(header) + end), stored


def _code(name: str, dtype: torch.dtype) -> str:
    if dtype not in _DTYPES:
        raise CheckpointError(
            f"{name!r} is of {dtype}, which safetensors files cannot hold", "convert it first, e.g. x.to(torch.float32)"
        )
    return _DTYPES[dtype]


def create_files(folder: Path, files: Iterable[NewFile], index: bytes | None) -> None:
    """Create the files with headers and final length, and the index. All ranks then write tensors into the files."""
    for name, header, length in files:
        with open(folder / name, "wb") as file:
            file.write(header)
            file.truncate(length)
    if index is not None:
        (folder / INDEX).write_bytes(index)


def is_weights(name: str) -> bool:
    """Return whether a file of this name contains weights, or their index."""
    return name == INDEX or (name.startswith("model") and name.endswith(".safetensors"))


def file_size(text: int | str) -> int:
    """Return the number of bytes of a size such as "5GB"."""
    if isinstance(text, int):
        return text
    for unit, factor in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if text.upper().endswith(unit):
            return int(float(text[:-2]) * factor)
    raise CheckpointError(f"hub.save got max_shard_size={text!r}", 'pass a number of bytes, or a text such as "5GB"')
