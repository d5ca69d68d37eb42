"""Damaged, missing, foreign and malicious files: a clear error on all ranks, and the state is as it was."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import shardwise
from shardwise import Shard, checkpoint, distribute_tensor
from shardwise.checkpoint.index import read_index
from shardwise.errors import CheckpointError
from tests.processes.pool import on_processes
from tests.processes.reference import mesh_of
from tests.worlds import mesh_of as simulated

WHOLE = torch.arange(4 * 300_000, dtype=torch.float32).view(4, -1)
FILE = "__2_0.distcp"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with simulated(4) as mesh:
        checkpoint.save(
            {"x": distribute_tensor(WHOLE, mesh, [Shard(0)]), "small": torch.ones(3), "n": 5}, tmp_path / "x"
        )
    return tmp_path / "x"


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def truncate(path: Path, by: int) -> None:
    os.truncate(path, path.stat().st_size - by)


def other_metadata(path: Path) -> None:
    path.write_bytes(pickle.dumps({"a": 1}))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda x: truncate(x / FILE, 100), r"__2_0.distcp is truncated: expected \d+ bytes, found \d+"),
    "empty": (lambda x: os.truncate(x / FILE, 0), r"__2_0.distcp is truncated: expected \d+ bytes, found 0"),
    "grown": (
        lambda x: (x / FILE).write_bytes((x / FILE).read_bytes() + b"x"),
        r"is foreign: expected \d+ bytes, found",
    ),
    "missing": (lambda x: (x / FILE).unlink(), r"__2_0.distcp is missing: expected a file of \d+ bytes"),
    "flipped": (lambda x: flip(x / FILE, 500_000), r"__2_0.distcp is damaged at bytes 0 to 1048576: expected checksum"),
    "flipped at the end": (lambda x: flip(x / FILE, 1_100_000), r"damaged at bytes 1048576 to 2097152: expected"),
    "swapped": (lambda x: shutil.copy(x / "__1_0.distcp", x / FILE), r"__2_0.distcp is (damaged|foreign|truncated)"),
    "metadata flipped": (lambda x: flip(x / ".metadata", 99), r"\.metadata is damaged: expected checksum \d+, found"),
    "metadata truncated": (lambda x: truncate(x / ".metadata", 9), r"\.metadata is damaged: expected size \d+, found"),
    "metadata missing": (lambda x: (x / ".metadata").unlink(), r"\.metadata is missing"),
    "metadata foreign": (lambda x: other_metadata(x / ".metadata"), r"\.metadata is damaged: expected size"),
    "index flipped": (lambda x: flip(x / "shardwise.json", 300), r"shardwise.json is damaged: expected"),
    "index truncated": (lambda x: truncate(x / "shardwise.json", 40), r"shardwise.json is damaged: expected"),
    "index foreign": (lambda x: (x / "shardwise.json").write_text('{"a": 1}\n{}\n'), r"shardwise.json is damaged"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_and_nothing_changes(folder: Path, damage: str) -> None:
    act, message = DAMAGES[damage]
    act(folder)
    with simulated(2) as mesh:
        state: dict[str, Any] = {"x": shardwise.zeros(WHOLE.shape, device_mesh=mesh, placements=[Shard(1)])}
        state |= {"small": torch.zeros(3), "n": 0}
        with pytest.raises(CheckpointError, match=message) as caught:
            checkpoint.load(state, folder)
        assert str(folder) in str(caught.value)
        assert "load an earlier checkpoint" in caught.value.fix
        assert not state["x"].full_tensor().shards[0].any()
        assert not state["small"].any()
        assert state["n"] == 0


def test_every_bit_counts(folder: Path) -> None:
    """No single flipped bit of a file of data goes unseen: a sample of all places."""
    index = read_index(folder)
    assert index is not None
    size = index.files["__0_0.distcp"].size
    original = (folder / "__0_0.distcp").read_bytes()
    generator = torch.Generator().manual_seed(0)
    for at in [*torch.randint(size, (12,), generator=generator).tolist(), 0, size - 1]:
        flip(folder / "__0_0.distcp", at)
        with pytest.raises(CheckpointError, match="damaged at bytes"):
            checkpoint.load({"x": torch.zeros(WHOLE.shape), "n": 0, "small": torch.zeros(3)}, folder)
        (folder / "__0_0.distcp").write_bytes(original)
    checkpoint.load({"x": torch.zeros(WHOLE.shape), "n": 0}, folder)


def test_only_what_is_read_is_verified(folder: Path) -> None:
    flip(folder / FILE, 500_000)
    state = {"n": 0}
    checkpoint.load(state, folder)
    assert state == {"n": 5}


@on_processes
def test_damage_that_one_rank_meets(tmp_path: Path) -> None:
    mesh = mesh_of(4)
    checkpoint.save({"x": distribute_tensor(WHOLE, mesh, [Shard(0)])}, tmp_path / "x")
    if dist.get_rank() == 0:
        flip(tmp_path / "x" / FILE, 500_000)
    dist.barrier()
    x = shardwise.zeros(WHOLE.shape, device_mesh=mesh, placements=[Shard(0)])
    with pytest.raises(CheckpointError, match=r"rank 2: .*__2_0.distcp is damaged at bytes 0 to"):
        checkpoint.load({"x": x}, tmp_path / "x")
    assert not x.to_local().any()
    dist.barrier()
    checkpoint.save({"x": x}, tmp_path / "y")  # the ranks still agree


def test_states_that_do_not_fit(folder: Path) -> None:
    state = {"x": torch.zeros(4, 7), "small": torch.zeros(3, dtype=torch.float64), "n": torch.zeros(2), "new": 1}
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(state, folder)
    for line in (
        "4 of 4 values do not fit",
        "'x': expected float32[4, 7], found float32[4, 300000]",
        "'small': expected float64[3], found float32[3]",
        "'n': expected float32[2], found a value that is no tensor",
        "'new': expected a value of type int, found nothing of this name",
    ):
        assert line in str(caught.value)
    assert "cast=True converts dtypes; strict=False leaves values unchanged that are missing" in str(caught.value)
    some = {"small": torch.zeros(3), "new": 1}
    checkpoint.load(some, folder, strict=False)
    assert torch.equal(some["small"], torch.ones(3))
    assert some["new"] == 1


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no such folder: pass the path given to save"):
        checkpoint.load({}, tmp_path / "x")
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match=r"\.metadata or the pointer 'latest', found a folder of 1 other"):
        checkpoint.load({}, tmp_path)
    with pytest.raises(CheckpointError, match=r"exists and is no checkpoint.*found a file"):
        checkpoint.save({"a": 1}, tmp_path / "file")


# ---- pickle ----------------------------------------------------------------------------------------------------------


class Malicious:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def without_index(folder: Path) -> None:
    (folder / "shardwise.json").unlink()


def test_malicious_metadata_is_refused(folder: Path, tmp_path: Path) -> None:
    without_index(folder)
    for payload in (Malicious(tmp_path / "made"), {"a": [Malicious(tmp_path / "made")]}):
        (folder / ".metadata").write_bytes(pickle.dumps(payload))
        with pytest.raises(CheckpointError, match=r"\.metadata is refused: it names posix.mkdir"):
            checkpoint.load({"n": 0}, folder)
    for other in (
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"ctorch\nload\n(S'x'\ntR.",
        b"ctorch.serialization\nload\n(S'x'\ntR.",
    ):
        (folder / ".metadata").write_bytes(other)
        with pytest.raises(CheckpointError, match="could run code"):
            checkpoint.load({"n": 0}, folder)
    (folder / ".metadata").write_bytes(b"no pickle")
    with pytest.raises(CheckpointError, match="damaged: expected pickled metadata"):
        checkpoint.load({"n": 0}, folder)
    (folder / ".metadata").write_bytes(pickle.dumps(torch.Size([1])))
    with pytest.raises(CheckpointError, match="foreign: expected the metadata of a checkpoint, found Size"):
        checkpoint.load({"n": 0}, folder)
    assert not (tmp_path / "made").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
def test_malicious_objects_are_refused(tmp_path: Path) -> None:
    """PyTorch stores any object; a checkpoint that it wrote is loaded without running what is in it."""
    dcp.save({"a": Malicious(tmp_path / "made"), "x": torch.ones(2)}, checkpoint_id=tmp_path / "x", no_dist=True)
    state = {"x": torch.zeros(2), "a": 0}
    with pytest.raises(CheckpointError, match="Weights only load failed"):
        checkpoint.load(state, tmp_path / "x")
    assert not state["x"].any()
    assert not (tmp_path / "made").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
def test_malicious_tensors_are_refused(tmp_path: Path) -> None:
    dcp.save({"x": torch.ones(2)}, checkpoint_id=tmp_path / "x", no_dist=True)
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Malicious(tmp_path / "made"), protocol=2))
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
    file = next((tmp_path / "x").glob("*.distcp"))
    file.write_bytes(data.getvalue().ljust(file.stat().st_size, b"\0"))
    with pytest.raises(CheckpointError):
        checkpoint.load({"x": torch.zeros(2)}, tmp_path / "x")
    assert not (tmp_path / "made").exists()


def test_what_needs_pickle_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'a\.b' is a .*Malicious, which can only be loaded by running code"):
        checkpoint.save({"a": {"b": Malicious(tmp_path / "made")}}, tmp_path / "x")
    assert not (tmp_path / "x").exists()
    assert not list(tmp_path.glob(".*"))


def test_files_outside_the_folder_are_not_read(folder: Path, tmp_path: Path) -> None:
    without_index(folder)
    metadata = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(metadata.replace(b"__2_0.distcp", b"../_0.distcp"))
    with pytest.raises(CheckpointError, match=r"names a file outside its folder: '../_0.distcp'"):
        checkpoint.load({"n": 0}, folder)
