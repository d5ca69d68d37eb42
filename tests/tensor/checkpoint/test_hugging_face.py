"""PyTorch's writer of safetensors files: one chunk for each name and file, so chunks are merged or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageReader, HuggingFaceStorageWriter

import shardwise
from shardwise import InterleavedShard, P, Replicate, Shard, distribute_tensor, init_device_mesh
from tests.processes.pool import on_processes
from tests.processes.reference import assert_same, mesh_of

safetensors = pytest.importorskip("safetensors.torch")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")

WHOLE = {
    "even": torch.arange(48.0).view(8, 6),
    "uneven": torch.arange(35, dtype=torch.float64).view(7, 5),
    "bf16": torch.arange(24).view(8, 3).bfloat16(),
    "scalar": torch.tensor(2.5),
    "nothing": torch.empty(0, 4),
}
WAYS: dict[str, Any] = {
    "rows": [Shard(0), Shard(0)],
    "both dims": [Shard(0), Shard(1)],
    "other order": P(("b", "a")),
    "replicated": [Replicate(), Replicate()],
    "over one axis": [Replicate(), Shard(0)],
}


def state(mesh: Any, placements: Any, whole: dict[str, torch.Tensor] = WHOLE) -> dict[str, Any]:
    def placed(tensor: torch.Tensor) -> Any:
        return distribute_tensor(tensor, mesh, placements if tensor.dim() else [Replicate()] * mesh.ndim)

    return {name: placed(tensor) for name, tensor in whole.items()}


def files(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of the safetensors files in a folder."""
    return {name: t for file in path.glob("*.safetensors") for name, t in safetensors.load_file(file).items()}


def assert_whole(found: dict[str, torch.Tensor], whole: dict[str, torch.Tensor] = WHOLE) -> None:
    assert found.keys() == whole.keys()
    for name, tensor in whole.items():
        assert_same(found[name], tensor, name)


@pytest.mark.parametrize("way", [*WAYS, "interleaved"])
def test_a_simulated_world_writes_full_tensors(tmp_path: Path, way: str) -> None:
    placements = WAYS.get(way, [Replicate(), InterleavedShard(1, 2)])
    whole = {name: t for name, t in WHOLE.items() if way != "interleaved" or name in ("even", "nothing")}
    with shardwise.simulate(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        saved = state(mesh, placements, whole)
        dcp.save(saved, storage_writer=HuggingFaceStorageWriter(str(tmp_path)), no_dist=True)
        found = files(tmp_path)
        assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())
        loaded = state(mesh, [Shard(0), Replicate()], {name: torch.zeros_like(t) for name, t in whole.items()})
        dcp.load(loaded, storage_reader=HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
        for name, tensor in whole.items():
            assert torch.equal(loaded[name].full_tensor().shards[3], tensor)


def test_several_files(tmp_path: Path) -> None:
    with shardwise.simulate(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        mapping = {name: index % 2 + 1 for index, name in enumerate(WHOLE)}
        writer = HuggingFaceStorageWriter(str(tmp_path), fqn_to_index_mapping=mapping)
        dcp.save(state(mesh, WAYS["both dims"]), storage_writer=writer, no_dist=True)
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    assert_whole(files(tmp_path))


@on_processes
def test_every_process_writes_its_shards(tmp_path: Path) -> None:
    mesh = mesh_of(2, 2)
    whole = {name: tensor for name, tensor in WHOLE.items() if tensor.dim()}
    for way, placements in WAYS.items():
        path = tmp_path / way
        writer = HuggingFaceStorageWriter(str(path), save_distributed=True, enable_consolidation=True)
        dcp.save(state(mesh, placements, whole), storage_writer=writer)
        dist.barrier()
        assert_whole(files(path), whole)
        loaded = state(mesh, [Replicate(), Shard(0)], {name: torch.zeros_like(t) for name, t in whole.items()})
        dcp.load(loaded, storage_reader=HuggingFaceStorageReader(str(path)))
        assert_whole({name: tensor.full_tensor() for name, tensor in loaded.items()}, whole)
    writer = HuggingFaceStorageWriter(str(tmp_path / "scalar"), save_distributed=True, enable_consolidation=True)
    with pytest.raises(CheckpointException, match="'scalar' has no dims: with enable_consolidation"):
        dcp.save(state(mesh, WAYS["rows"]), storage_writer=writer)


@on_processes
def test_blocks_that_do_not_touch_are_refused(tmp_path: Path) -> None:
    x = distribute_tensor(WHOLE["even"], mesh_of(4), [InterleavedShard(0, 2)])
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"x": x}, storage_writer=HuggingFaceStorageWriter(str(tmp_path), save_distributed=True))
    assert "a safetensors file holds one block of a tensor, but a rank holds 2 blocks of 'x' that do not form" in str(
        caught.value
    )
    assert "redistribute it first, e.g. to Shard(0)" in str(caught.value)
    assert not list(tmp_path.glob("*.safetensors"))


@on_processes
def test_ranks_that_write_the_same_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException) as caught:
        dcp.save(state(mesh_of(2, 2), WAYS["rows"]), storage_writer=HuggingFaceStorageWriter(str(tmp_path)))
    assert "4 ranks would write the same safetensors file" in str(caught.value)
    assert "pass save_distributed=True" in str(caught.value)
    assert not list(tmp_path.glob("*.safetensors"))
