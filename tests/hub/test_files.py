"""Headers and indexes: what safetensors writes is read, what we write safetensors reads, and damage is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwise.errors import CheckpointError
from shardwise.hub.files import Described, create_files, file_size, lay_out, read_folder

KINDS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.bool]


def tensors() -> dict[str, torch.Tensor]:
    made = {f"t{i}": torch.arange(6).view(2, 3).to(dtype) for i, dtype in enumerate(KINDS)}
    return {**made, "empty": torch.zeros(0, 4), "number": torch.tensor(3.0), "née": torch.ones(1)}


def test_what_safetensors_writes(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(tensors(), path, metadata={"format": "pt"})
    found = read_folder(tmp_path).tensors
    assert {name: (at.shape, at.dtype) for name, at in found.items()} == {
        name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors().items()
    }
    data = path.read_bytes()
    for name, tensor in tensors().items():
        at = found[name]
        expected = tensor.flatten().view(torch.uint8) if tensor.dim() else tensor.view(1).view(torch.uint8)
        assert data[at.offset : at.offset + at.nbytes] == bytes(expected.tolist())


def test_the_same_file_as_safetensors_writes(tmp_path: Path) -> None:
    zeros = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
    save_file(zeros, tmp_path / "theirs", metadata={"format": "pt"})
    described = {name: Described(tuple(tensor.shape), tensor.dtype) for name, tensor in zeros.items()}
    places, files, index = lay_out(tmp_path, described, 1 << 30, 0)
    create_files(tmp_path, files, index)
    assert index is None
    assert (tmp_path / "model.safetensors").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert read_folder(tmp_path).tensors == places


def test_several_files(tmp_path: Path) -> None:
    described = {f"t{i}": Described((10,), torch.float32) for i in range(5)}
    places, files, index = lay_out(tmp_path, described, 80, 50)
    create_files(tmp_path, files, index)
    assert [file.name for file in files] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert read_folder(tmp_path).tensors == places
    assert json.loads((tmp_path / "model.safetensors.index.json").read_text())["metadata"]["total_size"] == 200
    assert list(load_file(tmp_path / files[1].name)) == ["t2", "t3"]


@pytest.mark.parametrize(("text", "size"), [(7, 7), ("5GB", 5 * 10**9), ("1.5mb", 1_500_000), ("2KB", 2000)])
def test_sizes(text: int | str, size: int) -> None:
    assert file_size(text) == size


def test_a_size_without_a_unit() -> None:
    with pytest.raises(CheckpointError, match="max_shard_size='7'"):
        file_size("7")


# ---- damage ----------------------------------------------------------------------------------------------------------


def with_header(tmp_path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return tmp_path


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"x": ENTRY}, "is truncated: 'x' ends at byte"),
        ({"x": {**ENTRY, "dtype": "F7"}}, "expected a known dtype"),
        ({"x": {**ENTRY, "shape": None}}, "expected a known dtype"),
        ({"x": {**ENTRY, "shape": [3]}}, "is damaged: 'x' is F32"),
        ({"x": {**ENTRY, "data_offsets": [-8, 0]}}, "is damaged: 'x' is F32"),
        ([], "is no JSON object"),
        (b"{", "is no JSON"),
    ],
    ids=["truncated", "dtype", "shape", "size", "offset", "list", "text"],
)
def test_damaged_headers(header: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_folder(with_header(tmp_path, header))


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        read_folder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"PK\3\4" * 100)
    with pytest.raises(CheckpointError, match="is no safetensors file"):
        read_folder(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"x": "../elsewhere.safetensors"}}, "which is not in its folder"),
        ({"weight_map": {"x": "lacking.safetensors"}}, "does not exist, but the index names it"),
        ({"weight_map": {"y": "model.safetensors"}}, "names tensors that no file has: y"),
        ({"weight_map": 3}, "has no 'weight_map'"),
    ],
    ids=["outside", "lacking", "tensor", "no map"],
)
def test_damaged_indexes(index: object, message: str, tmp_path: Path) -> None:
    with_header(tmp_path, {"x": ENTRY}, bytes(8))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        read_folder(tmp_path)
