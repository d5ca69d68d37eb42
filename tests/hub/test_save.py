"""hub.save writes what safetensors would write, each element once, and a folder that is complete or not there."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shardwise import DTensor, InterleavedShard, Partial, Replicate, Shard, simulate, zeros
from shardwise.errors import CheckpointError
from shardwise.hub import load, save
from shardwise.hub.conversions import to_files
from shardwise.hub.files import Described, lay_out
from shardwise.hub.positioned import Transfer, Writer
from shardwise.hub.saving import _writes
from shardwise.hub.state import state_of
from shardwise.hub.transfers import patches_to_save
from shardwise.parallel import ExpertParallel
from shardwise.world import replicate
from tests.hub.models import Net, assert_same, net, plain, stored
from tests.hub.test_load import Blocks, Mixture, interleaved, sharded, two_axes
from tests.worlds import mesh_of

PLANS = {"0": sharded(0), "1": sharded(1), "interleaved": interleaved, "replicated": None}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_the_same_file_as_one_process_writes(plan: Any, tmp_path: Path) -> None:
    folder = stored(net(), tmp_path / "before")
    with mesh_of(4) as mesh:
        save(load(Net, folder, mesh, plan), tmp_path / "after")
    found, expected = (load_file(at / "model.safetensors") for at in (tmp_path / "after", folder))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert sorted(path.name for path in (tmp_path).iterdir()) == ["after", "before"]


def test_between_meshes(tmp_path: Path) -> None:
    with mesh_of(2, 3) as mesh:
        save(load(Net, stored(net(), tmp_path / "a"), mesh, two_axes), tmp_path / "b", max_shard_size=300)
    assert len(list((tmp_path / "b").iterdir())) > 2
    with mesh_of(4) as mesh:
        save(load(Net, tmp_path / "b", mesh, sharded(1)), tmp_path / "c")
    assert_same(load(Net, tmp_path / "c"), net())


def test_a_list_of_experts_that_is_stacked(tmp_path: Path) -> None:
    model = Mixture()
    with mesh_of(4, names=("ep",)) as mesh:
        save(load(Mixture, stored(model, tmp_path / "a"), mesh, {"experts": ExpertParallel()}), tmp_path / "b")
    assert_same(load(Mixture, tmp_path / "b"), model)


@pytest.mark.parametrize("plan", [*PLANS.values(), two_axes], ids=[*PLANS, "two axes"])
@pytest.mark.parametrize("split", [1, 1 << 20])
def test_every_byte_is_written_once(plan: Any, split: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.hub.transfers.SPLIT", split)
    sizes = (2, 2) if plan is two_axes else (4,)
    with mesh_of(*sizes) as mesh:
        state = state_of(model := load(Net, stored(net(), tmp_path), mesh, plan))
        files = to_files(model, state)
        described = {key: Described(tuple(entry.shape), entry.dtype) for key, entry in files.items()}
        places, _, _ = lay_out(tmp_path, described, 1 << 30, 0)
        patches = [patch for key, entry in files.items() for patch in patches_to_save(entry, places[key])]
        total = sum(transfer.nbytes for transfer in _writes(state, patches))
        assert total == sum(math.prod(kind.shape) * kind.dtype.itemsize for kind in described.values())


def test_parameters_that_are_gathered_while_a_module_runs(tmp_path: Path) -> None:
    """After a forward pass, `fully_shard` keeps those of the root gathered, for a backward pass."""
    model = Blocks()
    with mesh_of(4) as mesh:
        found = load(Blocks, stored(model, tmp_path / "a"), mesh, "fully_sharded")
        found(torch.randn(2, 6))
        save(found, tmp_path / "b")
        assert_same(found, model)
        found(torch.randn(2, 6))
        other = Blocks()
        load(found, stored(other, tmp_path / "c"))
        x = torch.randn(2, 6)
        torch.testing.assert_close(plain(found(x)), other(x).detach())
    assert_same(load(Blocks, tmp_path / "b"), model)


def test_plain_tensors_of_ranks(tmp_path: Path) -> None:
    with mesh_of(4):
        model = torch.nn.Module()
        model.register_buffer("steps", replicate(torch.arange(3.0)))
        save(model, tmp_path / "a")
        model.steps.zero_()
        load(model, tmp_path / "a")
        assert all(torch.equal(shard, torch.arange(3.0)) for shard in model.steps.shards)


def test_replicas_divide_what_they_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.hub.transfers.SPLIT", 1)
    rows: list[int] = []
    original = Writer.write

    def noted(self: Writer, transfer: Transfer) -> None:
        rows.append(len(transfer.view))
        original(self, transfer)

    monkeypatch.setattr(Writer, "write", noted)
    with mesh_of(4) as mesh:
        model = torch.nn.Module()
        model.weight = torch.nn.Parameter(zeros(10, 2, device_mesh=mesh, placements=[Replicate()]))
        save(model, tmp_path / "a")
    assert sorted(rows) == [1, 3, 3, 3]


# ---- complete or not there -------------------------------------------------------------------------------------------


def test_a_save_that_fails_leaves_the_earlier_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(net(), tmp_path / "model")
    (folder / "tokenizer.json").write_text("words")

    def full(self: object, transfer: object) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Writer, "write", full)
        with pytest.raises(CheckpointError, match=r"cannot save .*model: no space left on device"):
            save(net(1), folder)
    assert_same(load(Net, folder), net())
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_save_over_an_earlier_folder(exchanges: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other files are kept, whether the system can exchange two folders in one step or not."""
    if not exchanges:
        monkeypatch.setattr("shardwise.hub.folder._exchange", lambda one, other: False)
    folder = save(net(), tmp_path / "model", max_shard_size=100)
    (folder / "tokenizer.json").write_text("words")
    (folder / "more").mkdir()
    (folder / "more" / "card.md").write_text("text")
    save(net(1), folder)
    assert sorted(path.name for path in folder.iterdir()) == ["model.safetensors", "more", "tokenizer.json"]
    assert (folder / "more" / "card.md").read_text() == "text"
    assert_same(load(Net, folder), net(1))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_a_killed_save_leaves_is_cleared(tmp_path: Path) -> None:
    folder = save(net(), tmp_path / "model")
    folder.rename(tmp_path / ".model.replaced")  # killed between two renames
    (tmp_path / ".model.saving").mkdir()
    save(net(1), folder)
    assert_same(load(Net, folder), net(1))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        save(net(), tmp_path / "file")
    with torch.device("meta"):
        model = torch.nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match="'weight' is on the meta device"):
        save(model, tmp_path / "model")
    with simulate(2), mesh_of(2) as mesh:
        model = torch.nn.Module()
        model.register_buffer("sum", DTensor.from_local(torch.ones(2), mesh, [Partial()]))
        with pytest.raises(CheckpointError, match="no rank holds its values"):
            save(model, tmp_path / "model")


def test_placements_that_only_a_layout_describes(tmp_path: Path) -> None:
    with mesh_of(4) as mesh:
        model = torch.nn.Module()
        whole = torch.arange(48.0).view(12, 4)
        sharded = zeros(12, 4, device_mesh=mesh, placements=[InterleavedShard(0, 3)])
        sharded.copy_(DTensor.from_local(whole, mesh, [Replicate()]))
        model.weight = torch.nn.Parameter(sharded.transpose(0, 1))
        save(model, tmp_path / "a")
        assert model.weight.placements != (Shard(0),)
    assert torch.equal(load_file(tmp_path / "a" / "model.safetensors")["weight"], whole.t())


def test_kills() -> None:
    """A few of what `python -m tests.hub.killing --kills 20` does."""
    pytest.importorskip("transformers")
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root / "src"), str(root)])
    done = subprocess.run(
        [sys.executable, "-m", "tests.hub.killing", "--kills", "3", "--seed", "7"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("3 kills")
