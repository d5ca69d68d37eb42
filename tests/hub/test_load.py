"""hub.load reads the shards of any placement, and nothing else."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from shardwise import InterleavedShard, P, Placement, Replicate, Shard, init_device_mesh, simulate
from shardwise.errors import CheckpointError, InputError
from shardwise.hub import LoadReport, load, load_with_report
from shardwise.hub.build import parameters_on_meta
from shardwise.hub.files import read_folder
from shardwise.hub.positioned import Reader, Transfer
from shardwise.parallel import ColwiseParallel, ExpertParallel, RowwiseParallel
from shardwise.tensor.dtensor import DTensor
from tests.hub.models import Net, assert_same, net, plain, stored
from tests.worlds import mesh_of


def sharded(dim: int) -> Any:
    """Every parameter sharded in a dim, over the last axis."""

    def placements(name: str, parameter: Tensor) -> list[Placement] | None:
        return [Shard(min(dim, parameter.dim() - 1))]

    return placements


def interleaved(name: str, parameter: Tensor) -> list[Placement]:
    if name.startswith("fused"):
        return [InterleavedShard(0, 2)]
    return [Replicate()]


def two_axes(name: str, parameter: Tensor) -> Any:
    if parameter.dim() == 2:
        return [Shard(1), Shard(0)] if "embedding" in name or "head" in name else [Shard(0), Shard(0)]
    return P(("b", "a"))


@pytest.mark.parametrize("plan", [sharded(0), sharded(1), interleaved, None], ids=["0", "1", "interleaved", "none"])
def test_one_axis(plan: Any, tmp_path: Path) -> None:
    model = net()
    folder = stored(model, tmp_path)
    with mesh_of(4) as mesh:
        found, report = load_with_report(Net, folder, mesh, plan)
        assert_same(found, model)
        assert found.head.weight is found.embedding.weight
        assert report.read_bytes == report.shard_bytes
        local = sum(t._local_tensor.shards[3].nbytes for t in {*found.parameters(), found.count, found.order})
        assert report.read_bytes[3] == local


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 6)) for _ in range(2))
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def test_fully_sharded(tmp_path: Path) -> None:
    model = Blocks()
    with mesh_of(4) as mesh:
        found, report = load_with_report(Blocks, stored(model, tmp_path), mesh, "fully_sharded")
        assert_same(found, model)
        assert report.read_bytes == report.shard_bytes
        assert [type(module).__name__ for module in (found, found.blocks[1])] == ["FSDPBlocks", "FSDPSequential"]
        x = torch.randn(2, 6)
        torch.testing.assert_close(plain(found(x)), model(x).detach())


def test_two_axes_in_any_order(tmp_path: Path) -> None:
    with mesh_of(2, 3) as mesh:
        assert_same(load(Net, stored(net(), tmp_path), mesh, two_axes), net())


def test_a_plan_of_styles(tmp_path: Path) -> None:
    plan = {"embedding": RowwiseParallel(), "head": ColwiseParallel(), "fused": "packed_colwise"}
    with mesh_of(4, names=("tp",)) as mesh:
        found = load(Net, stored(net(), tmp_path), mesh, plan)
        assert_same(found, net())
        assert found.embedding.weight.placements == (Shard(0),)
        assert found.fused.weight.placements == (InterleavedShard(0, 2),)
        assert not isinstance(found.scale, DTensor)


def test_without_a_mesh(tmp_path: Path) -> None:
    assert_same(load(Net, stored(net(), tmp_path)), net())


def test_into_a_model_that_is_distributed_already(tmp_path: Path) -> None:
    with mesh_of(4) as mesh:
        model = load(Net, stored(net(), tmp_path / "a"), mesh, sharded(0))
        before = model.fused.weight
        assert load(model, stored(net(1), tmp_path / "b")) is model
        assert model.fused.weight is before
        assert_same(model, net(1))


def test_several_files(tmp_path: Path) -> None:
    state = {key: tensor.clone() for key, tensor in net().state_dict().items() if key != "head.weight"}
    names = {key: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, key in enumerate(state)}
    for file in set(names.values()):
        save_file({key: state[key] for key in state if names[key] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    with mesh_of(4) as mesh:
        assert_same(load(Net, tmp_path, mesh, sharded(1)), net())


def test_the_report(tmp_path: Path) -> None:
    folder, report = stored(net(), tmp_path), LoadReport()
    load(Net, folder, report=report)
    assert report.read_bytes == report.shard_bytes == {0: sum(t.nbytes for t in read_folder(folder).tensors.values())}
    assert report.header_bytes == read_folder(folder).header_bytes
    assert load_with_report(Net, folder)[1] == report


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_another_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    expected = net()
    for parameter in expected.parameters():
        parameter.data = parameter.data.to(dtype)
    with mesh_of(4) as mesh:
        assert_same(load(Net, stored(net(), tmp_path), mesh, sharded(1), dtype=dtype), expected)
        with pytest.raises(InputError, match="distributed parameters"):
            load(load(Net, tmp_path, mesh, sharded(1)), tmp_path, dtype=dtype)


def test_views_larger_than_the_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.hub.positioned.BUFFER", 16)
    monkeypatch.setattr("shardwise.hub.positioned.MANY", 1000)
    with mesh_of(4) as mesh:
        for plan in (sharded(1), interleaved):
            assert_same(load(Net, stored(net(), tmp_path), mesh, plan), net())
        expected = net()
        for parameter in expected.parameters():
            parameter.data = parameter.data.to(torch.float64)
        assert_same(load(Net, stored(net(), tmp_path), mesh, sharded(1), dtype=torch.float64), expected)


@pytest.mark.parametrize("dtype", [None, torch.float64])
@pytest.mark.parametrize("plan", [sharded(1), interleaved], ids=["1", "interleaved"])
def test_short_runs_are_read_from_windows(
    plan: Any, dtype: torch.dtype | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"MANY": 2, "WINDOW": 60}.items():
        monkeypatch.setattr(f"shardwise.hub.positioned.{name}", value)
    windows: list[Transfer] = []
    original = Reader._read_mapped
    monkeypatch.setattr(Reader, "_read_mapped", lambda self, part: (windows.append(part), original(self, part)))
    expected = net()
    for parameter in expected.parameters():
        parameter.data = parameter.data.to(dtype or torch.float32)
    with mesh_of(4) as mesh:
        found, report = load_with_report(Net, stored(net(), tmp_path), mesh, plan, dtype=dtype)
        assert_same(found, expected)
        assert report.read_bytes == report.shard_bytes
    assert (len(windows) > 4) == (plan is not interleaved)
    assert all(part.span <= 60 for part in windows)


@pytest.mark.parametrize("many", [2, 1000], ids=["window", "runs"])
def test_a_file_that_is_cut_after_its_header_was_read(
    many: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.hub.positioned.MANY", many)
    path = stored(net(), tmp_path) / "model.safetensors"
    found = read_folder(tmp_path).tensors["embedding.weight"]
    os.truncate(path, found.offset + 100)
    transfer = Transfer(found, 0, (6, 1), torch.empty(10, 3))
    with Reader() as reader, pytest.raises(CheckpointError, match="ends at byte"):
        reader.read(transfer)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 6) for _ in range(8))


def test_a_list_of_experts_that_is_stacked(tmp_path: Path) -> None:
    model = Mixture()
    with mesh_of(4, names=("ep",)) as mesh:
        found, report = load_with_report(Mixture, stored(model, tmp_path), mesh, {"experts": ExpertParallel()})
        weight = found.experts.stacked.weight
        assert weight.placements == (Shard(0),)
        assert torch.equal(plain(weight), torch.stack([expert.weight.detach() for expert in model.experts]))
        assert report.read_bytes[0] == 2 * (4 * 6 + 6) * 4


# ---- what does not fit -----------------------------------------------------------------------------------------------


def test_all_keys_that_do_not_fit_are_listed_at_once(tmp_path: Path) -> None:
    state = {key: tensor.clone() for key, tensor in net(rows=11).state_dict().items() if key != "head.weight"}
    del state["scale"], state["count"]
    state["other.weight"] = state["another"] = torch.zeros(3)
    state["another"] = torch.zeros(2)
    save_file(state, tmp_path / "model.safetensors")
    with mesh_of(4) as mesh, pytest.raises(CheckpointError) as caught:
        load(Net, tmp_path, mesh)
    text = str(caught.value)
    for line in ("2 missing:", "scale", "count", "2 unexpected:", "other.weight", "another", "1 of another shape:"):
        assert line in text
    assert "embedding.weight: [11, 6] in the files, [10, 6] in the model" in text


def test_unexpected_keys_may_be_left_out(tmp_path: Path) -> None:
    state = {key: tensor.clone() for key, tensor in net().state_dict().items() if key != "head.weight"}
    save_file({**state, "more": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="strict=False"):
        load(Net, tmp_path)
    assert_same(load(Net, tmp_path, strict=False), net())


def test_buffers_that_would_be_left_uninitialised(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = Net()
    with pytest.raises(CheckpointError, match="buffers frequencies are on the meta device"):
        load(model, stored(net(), tmp_path))


@pytest.mark.parametrize("plan", ["tp", 3, "base_model_tp_plan"])
def test_plans_that_are_none(plan: Any, tmp_path: Path) -> None:
    with mesh_of(4) as mesh, pytest.raises(InputError, match="plan="):
        load(Net, stored(net(), tmp_path), mesh, plan)


@pytest.mark.parametrize("model", [3, lambda: 3], ids=["number", "function"])
def test_models_that_are_none(model: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError):
        load(model, stored(net(), tmp_path))


def test_building_leaves_no_memory_behind() -> None:
    with parameters_on_meta():
        model = Net()
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model.frequencies, net().frequencies)
    assert not nn.Linear(2, 2).weight.is_meta


def test_a_mesh_of_some_ranks(tmp_path: Path) -> None:
    with simulate(8):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))["tp"]
        assert_same(load(Net, stored(net(), tmp_path), mesh, sharded(0)), net())
