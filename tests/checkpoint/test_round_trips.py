"""What is saved on one mesh loads on any other, bit by bit; PyTorch's tools read our files, and we read theirs."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import shardwise
from shardwise import Partial, Replicate, Shard, checkpoint, distribute_tensor, init_device_mesh
from shardwise.checkpoint.plan import plan_cache
from shardwise.errors import CheckpointError
from tests.processes.pool import on_processes
from tests.processes.reference import mesh_of
from tests.tensor.checkpoint.states import WAYS, WHOLE, blank, check, state
from tests.worlds import mesh_of as simulated

NO_DIST = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")


def save(path: Path, sizes: tuple[int, ...], way: str) -> None:
    with simulated(*sizes) as mesh:
        checkpoint.save(state(mesh, way), path)


def load(path: Path, sizes: tuple[int, ...], way: str) -> None:
    with simulated(*sizes) as mesh:
        tensors = blank(mesh, way)
        assert checkpoint.load(tensors, path) == path
        check(tensors, mesh, way)


@pytest.mark.parametrize("source", WAYS)
def test_from_any_placements_to_any(tmp_path: Path, source: str) -> None:
    save(tmp_path / "x", (2, 3), source)
    for target in WAYS:
        load(tmp_path / "x", (3, 2), target)


def test_from_mesh_to_mesh(tmp_path: Path) -> None:
    for stop, (here, there) in enumerate(itertools.pairwise([(2, 2), (4,), (1,), (8,), (2, 2)])):
        save(tmp_path / str(stop), here, WAYS[stop])
        load(tmp_path / str(stop), there, WAYS[stop + 1])


def test_without_a_world(tmp_path: Path) -> None:
    save(tmp_path / "sharded", (2, 2), "interleaved")
    plain = {name: torch.zeros_like(whole) for name, whole in WHOLE.items()}
    checkpoint.load(plain, tmp_path / "sharded")
    for name, whole in WHOLE.items():
        assert torch.equal(plain[name], whole), name
    checkpoint.save(plain, tmp_path / "plain")
    load(tmp_path / "plain", (3, 2), "backwards")


def test_nested_states_and_plain_values(tmp_path: Path) -> None:
    values = {"a": 3, "b": {"c": [1, 2], "d": (0.5, None), 7: "x"}, "e": [{"f": True}, torch.ones(2)], "g": -0.0}
    checkpoint.save(values, tmp_path / "x")
    found: dict[str, Any] = {
        "a": 0, "b": {"c": None, "d": None, 7: None}, "e": [{"f": None}, torch.zeros(2)], "g": 1.0
    }  # fmt: skip
    checkpoint.load(found, tmp_path / "x")
    assert torch.equal(found["e"].pop(), torch.ones(2))
    values["e"].pop()  # type: ignore[attr-defined]
    assert repr(found) == repr(values)


def test_rank_tensors_are_replicated(tmp_path: Path) -> None:
    with shardwise.simulate(3):
        checkpoint.save({"x": shardwise.world.replicate(torch.arange(4.0))}, tmp_path / "x")
        found = {"x": shardwise.world.replicate(torch.zeros(4))}
        checkpoint.load(found, tmp_path / "x")
        assert all(torch.equal(shard, torch.arange(4.0)) for shard in found["x"].shards)
        with pytest.raises(CheckpointError, match="different sizes on the ranks"):
            checkpoint.save({"x": shardwise.world.map_ranks(torch.ones)}, tmp_path / "y")


def test_large_tensors_in_parts(tmp_path: Path) -> None:
    """Boxes that are read by rows, by runs and through scratch memory, from chunks of several blocks."""
    whole = torch.arange(3 * 640 * 1300, dtype=torch.int32).view(3, 640, 1300)
    with simulated(2, 2) as mesh:
        for number, placements in enumerate(([Replicate(), Replicate()], [Shard(0), Shard(1)], [Shard(2), Shard(1)])):
            checkpoint.save({"x": distribute_tensor(whole, mesh, placements)}, tmp_path / str(number))
        for number, placements in itertools.product(range(3), ([Shard(1), Shard(2)], [Replicate(), Shard(2)])):
            found = {"x": distribute_tensor(torch.zeros_like(whole), mesh, placements)}
            checkpoint.load(found, tmp_path / str(number))
            assert torch.equal(found["x"].full_tensor().shards[3], whole)
        cast = {"x": distribute_tensor(torch.zeros(whole.shape, dtype=torch.float64), mesh, [Shard(2), Shard(0)])}
        checkpoint.load(cast, tmp_path / "1", cast=True)
        assert torch.equal(cast["x"].full_tensor().shards[3], whole.double())
        transposed = {"x": distribute_tensor(whole.mT.contiguous(), mesh, [Shard(1), Shard(2)]).mT}
        checkpoint.save(transposed, tmp_path / "transposed")
        found = {"x": distribute_tensor(torch.zeros_like(whole).mT.contiguous(), mesh, [Shard(0), Shard(2)]).mT}
        checkpoint.load(found, tmp_path / "transposed")
        assert torch.equal(found["x"].full_tensor().shards[1], whole)


def test_a_loaded_tensor_is_a_written_one(tmp_path: Path) -> None:
    with simulated(4) as mesh:
        checkpoint.save({"x": distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])}, tmp_path / "x")
        x = shardwise.zeros(8, device_mesh=mesh, placements=[Shard(0)])
        assert float((x @ x).full_tensor()) == 0
        version = x._version
        checkpoint.load({"x": x}, tmp_path / "x")
        assert x._version > version
        assert float((x @ x).full_tensor()) == 140


def test_every_element_is_stored_once_and_spread(tmp_path: Path) -> None:
    whole = torch.arange(4 << 18, dtype=torch.float32).view(-1, 256)
    with simulated(2, 2) as mesh:
        values = {"large": distribute_tensor(whole, mesh, [Replicate(), Replicate()])}
        values |= {str(i): distribute_tensor(torch.ones(1 << 14), mesh, [Replicate(), Replicate()]) for i in range(16)}
        values["sharded"] = distribute_tensor(whole, mesh, [Replicate(), Shard(0)])
        checkpoint.save(values, tmp_path / "x")
    stored = FileSystemReader(tmp_path / "x").read_metadata().state_dict_metadata
    for name, value in values.items():
        assert sum(chunk.sizes.numel() for chunk in stored[name].chunks) == value.numel(), name
    sizes = [path.stat().st_size for path in (tmp_path / "x").glob("*.distcp")]
    assert len(sizes) == 4
    assert max(sizes) < 1.01 * min(sizes)


def test_plans_are_kept_until_something_changes(tmp_path: Path) -> None:
    with simulated(4) as mesh:
        values: dict[str, Any] = {"x": distribute_tensor(torch.arange(8.0), mesh, [Shard(0)]), "n": 1}
        for number in range(3):
            values["n"] = 10**number
            values["x"] = values["x"] + 1
            checkpoint.save(values, tmp_path / str(number))
        assert plan_cache().made == 1
        values["x"] = values["x"].redistribute(placements=[Replicate()])
        checkpoint.save(values, tmp_path / "3")
        assert plan_cache().made == 2
        found = {"x": torch.zeros(8), "n": 0}
        checkpoint.load(found, tmp_path / "2")
        assert found["n"] == 100
        assert torch.equal(found["x"], torch.arange(8.0) + 3)


@NO_DIST
def test_tools_of_pytorch_read_the_files(tmp_path: Path) -> None:
    with simulated(2, 2) as mesh:
        checkpoint.save({"model": state(mesh, "interleaved"), "step": 7, "names": ["a"]}, tmp_path / "x")
        tensors = blank(mesh, "first dim")
        found = {"model": tensors, "step": 0, "names": []}
        dcp.load(found, checkpoint_id=tmp_path / "x", no_dist=True)
        check(tensors, mesh, "first dim")
        assert (found["step"], found["names"]) == (7, ["a"])
    dcp_to_torch_save(tmp_path / "x", tmp_path / "file.pt")
    whole = torch.load(tmp_path / "file.pt", weights_only=True)
    assert whole["step"] == 7
    for name, value in WHOLE.items():
        assert torch.equal(whole["model"][name], value), name


@NO_DIST
def test_checkpoints_of_pytorch_are_read(tmp_path: Path) -> None:
    with simulated(4) as mesh:
        dcp.save({"model": state(mesh, "last dim"), "step": 7}, checkpoint_id=tmp_path / "x", no_dist=True)
    with simulated(2, 3) as mesh:
        found = {"model": blank(mesh, "backwards"), "step": 0}
        checkpoint.load(found, tmp_path / "x")
        check(found["model"], mesh, "backwards")
        assert found["step"] == 7


def test_partial_tensors_are_refused(tmp_path: Path) -> None:
    with simulated(4) as mesh:
        x = distribute_tensor(torch.ones(4), mesh, [Partial()])
        with pytest.raises(CheckpointError, match=r"f32\[4\] sum\(a\) cannot be saved.*redistribute it first"):
            checkpoint.save({"x": x}, tmp_path / "x")
    assert not (tmp_path / "x").exists()


# ---- processes -------------------------------------------------------------------------------------------------------


@on_processes
def save_on_processes(path: Path, sizes: tuple[int, ...], way: str, background: bool) -> None:
    tensors = state(mesh_of(*sizes), way)
    if background:
        saving = checkpoint.async_save(tensors, path)
        for tensor in tensors.values():
            tensor.zero_()  # the copy was made
        assert saving.wait() == path
    else:
        assert checkpoint.save(tensors, path) == path


@on_processes
def load_on_processes(path: Path, sizes: tuple[int, ...], way: str) -> None:
    mesh = mesh_of(*sizes)
    tensors = blank(mesh, way)
    checkpoint.load(tensors, path)
    check(tensors, mesh, way)


def test_processes_and_simulated_ranks_write_the_same_files(tmp_path: Path) -> None:
    for way in ("first dim", "interleaved", "replicated"):
        save_on_processes(path=tmp_path / "real", sizes=(2, 2), way=way, background=way == "interleaved")
        save(tmp_path / "simulated", (2, 2), way)
        for path in (tmp_path / "real").glob("*.distcp"):
            assert path.read_bytes() == (tmp_path / "simulated" / path.name).read_bytes()
        load(tmp_path / "real", (2, 3), "last dim")
        load_on_processes(path=tmp_path / "simulated", sizes=(4,), way="backwards")


@on_processes
def test_dtensors_of_pytorch(tmp_path: Path) -> None:
    from torch.distributed import tensor as theirs

    whole = torch.arange(35.0).view(7, 5)
    mesh = mesh_of(2, 2)
    before = plan_cache().made
    for number, plans in enumerate([1, 2, 2]):  # the second and third have one plan: ranks hold the same boxes
        placements = [theirs.Replicate(), theirs.Shard(0 if number else 1)]
        state: dict[str, Any] = {"x": theirs.distribute_tensor(whole + number - 1, mesh, placements)}
        checkpoint.save(state, tmp_path / "x")
        assert plan_cache().made == before + plans
    found = {"x": shardwise.zeros(7, 5, device_mesh=mesh, placements=[Shard(1), Shard(0)])}
    checkpoint.load(found, tmp_path / "x")
    assert torch.equal(found["x"].full_tensor(), whole + 1)
    checkpoint.save(found, tmp_path / "y")
    checkpoint.load(state, tmp_path / "y")
    assert torch.equal(state["x"].full_tensor(), whole + 1)


@on_processes
def test_ranks_of_a_submesh(tmp_path: Path) -> None:
    """Each half of the ranks has a tensor of its own, and all have a plain value."""
    mesh = mesh_of(2, 2)
    half = torch.distributed.get_rank() // 2
    stage = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"]
    values: dict[str, Any] = {f"stage{half}": distribute_tensor(torch.arange(6.0) + half, stage, [Shard(0)]), "n": 4}
    checkpoint.save(values, tmp_path / "x")
    found = {name: shardwise.zeros(6, device_mesh=mesh, placements=[Shard(0)] * 2) for name in ("stage0", "stage1")}
    checkpoint.load(found, tmp_path / "x")
    for number in range(2):
        assert torch.equal(found[f"stage{number}"].full_tensor(), torch.arange(6.0) + number)
