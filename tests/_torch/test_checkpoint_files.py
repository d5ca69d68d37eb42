"""The classes in the `.metadata` file of a checkpoint, and what is relied on."""

from __future__ import annotations

import pickle
import pickletools
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from shardwise._torch.checkpoint_files import metadata_global, place_in_file, with_version


def test_a_place_is_what_the_reader_of_pytorch_expects() -> None:
    place = place_in_file("a", 1, 2)
    assert (place.relative_path, place.offset, place.length) == ("a", 1, 2)
    assert place.transform_descriptors is None


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
def test_all_that_pytorch_writes_is_admitted(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(2, 3).bfloat16(), "b": [1, {"c": torch.ones(())}]}, checkpoint_id=tmp_path, no_dist=True)
    data = (tmp_path / ".metadata").read_bytes()
    texts: list[str] = []
    found = 0
    for opcode, argument, _ in pickletools.genops(data):
        if isinstance(argument, str):
            texts.append(argument)
        assert opcode.name not in ("GLOBAL", "INST", "EXT1", "EXT2", "EXT4")
        found += opcode.name == "STACK_GLOBAL"
    assert found >= 8
    read = pickle.loads(data)
    assert isinstance(read, Metadata)
    assert isinstance(read.storage_data[MetadataIndex("a", [0, 0])], type(place_in_file("", 0, 0)))
    for module, name in (("torch", "float32"), ("torch", "Size"), (Metadata.__module__, "Metadata")):
        assert metadata_global(module, name) is not None


def test_nothing_else_is_admitted() -> None:
    for module, name in (("os", "system"), ("builtins", "eval"), ("torch", "load"), ("torch", "hub"), ("torch", "ops")):
        assert metadata_global(module, name) is None
    for name in ("io", "pickle", "FileSystem", "os"):
        assert metadata_global("torch.distributed.checkpoint.filesystem", name) is None


def test_the_version_of_the_format() -> None:
    assert isinstance(with_version(Metadata({})), Metadata)
