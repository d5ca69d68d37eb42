"""torch.distributed.checkpoint in the simulated world: what is saved on one mesh loads on any other.

The simulated world is one process, so checkpoints are written and read with `no_dist=True`: there is nobody to
agree with, and this process brings the parts of all ranks itself.
"""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh

import shardwise
from shardwise import InterleavedShard, Partial, Replicate, Shard, distribute_tensor
from shardwise.errors import PlacementError, WorldError
from tests.tensor.checkpoint.states import WAYS, WHOLE, blank, check, state

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")

AXES = ("a", "b")


def mesh_of(sizes):
    return init_device_mesh("cpu", sizes, mesh_dim_names=AXES[: len(sizes)])


def ranks(sizes) -> int:
    return torch.Size(sizes).numel()


def save(path, sizes, way) -> None:
    with shardwise.simulate(ranks(sizes)):
        dcp.save(state(mesh_of(sizes), way), checkpoint_id=path, no_dist=True)


def load(path, sizes, way) -> None:
    with shardwise.simulate(ranks(sizes)):
        mesh = mesh_of(sizes)
        tensors = blank(mesh, way)
        dcp.load(tensors, checkpoint_id=path, no_dist=True)
        check(tensors, mesh, way)


def test_from_mesh_to_mesh(tmp_path) -> None:
    journey = [(2, 2), (4,), (1,), (2, 3), (8,), (2, 2)]
    for stop, (here, there) in enumerate(itertools.pairwise(journey)):
        save(tmp_path / str(stop), here, WAYS[stop])
        load(tmp_path / str(stop), there, WAYS[stop + 1])


@pytest.mark.parametrize("source", WAYS)
def test_from_any_cut_to_any_cut(tmp_path, source) -> None:
    save(tmp_path, (2, 3), source)
    for target in WAYS:
        load(tmp_path, (3, 2), target)


def test_a_checkpoint_holds_every_element_once(tmp_path) -> None:
    for way in WAYS:
        save(tmp_path / way, (2, 2), way)
        metadata = FileSystemReader(tmp_path / way).read_metadata().state_dict_metadata
        for name, whole in WHOLE.items():
            stored = metadata[name]
            assert stored.size == whole.shape
            assert stored.properties.dtype == whole.dtype
            assert sum(chunk.sizes.numel() for chunk in stored.chunks) == whole.numel()
            assert len(stored.chunks) >= 1, f"{name} has no chunk and would be lost"
            assert len({chunk.offsets for chunk in stored.chunks}) == len(stored.chunks)


def test_into_plain_tensors_and_back(tmp_path) -> None:
    save(tmp_path / "cut", (2, 2), "interleaved")
    plain = {name: torch.zeros_like(whole) for name, whole in WHOLE.items()}
    dcp.load(plain, checkpoint_id=tmp_path / "cut", no_dist=True)  # no world at all
    for name, whole in WHOLE.items():
        assert torch.equal(plain[name], whole)
    dcp.save(plain, checkpoint_id=tmp_path / "plain", no_dist=True)
    load(tmp_path / "plain", (3, 2), "backwards")


def test_through_writer_and_reader(tmp_path) -> None:
    with shardwise.simulate(4):
        mesh = mesh_of((4,))
        saved = state(mesh, "first dim")
        dcp.save(saved, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
        loaded = blank(mesh, "last dim")
        dcp.load(loaded, storage_reader=FileSystemReader(tmp_path), no_dist=True)
        check(loaded, mesh, "last dim")
        check(saved, mesh, "first dim")


def test_layouts_of_a_fused_weight(tmp_path) -> None:
    whole = torch.arange(48.0).view(12, 4)
    with shardwise.simulate(4):
        mesh = mesh_of((4,))
        dcp.save(
            {"qkv": distribute_tensor(whole, mesh, [InterleavedShard(0, 3)])}, checkpoint_id=tmp_path, no_dist=True
        )
    with shardwise.simulate(2):
        loaded = {"qkv": shardwise.zeros(12, 4, device_mesh=mesh_of((2,)), placements=[InterleavedShard(0, 3)])}
        dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
        assert loaded["qkv"].shards[1][:, 0].tolist() == [8, 12, 24, 28, 40, 44]


def test_partial_cannot_be_saved(tmp_path) -> None:
    with shardwise.simulate(4):
        x = distribute_tensor(torch.ones(4), mesh_of((4,)), [Partial()])
        with pytest.raises(CheckpointException) as caught:
            dcp.save({"x": x}, checkpoint_id=tmp_path, no_dist=True)
        assert "f32[4] sum(a) cannot be saved or loaded while it is Partial: no rank holds its" in str(caught.value)
        with pytest.raises(PlacementError, match="redistribute it first"):
            x.__create_write_items__("x", x)


def test_another_shape_is_refused(tmp_path) -> None:
    save(tmp_path, (4,), "first dim")
    with shardwise.simulate(4):
        wrong = {"even": shardwise.zeros(4, 6, device_mesh=mesh_of((4,)), placements=[Shard(0)])}
        with pytest.raises(CheckpointException, match="Size mismatch"):
            dcp.load(wrong, checkpoint_id=tmp_path, no_dist=True)


def test_async_save(tmp_path) -> None:
    with shardwise.simulate(4):
        mesh = mesh_of((2, 2))
        tensors = state(mesh, "backwards")
        dcp.async_save(tensors, checkpoint_id=tmp_path, no_dist=True).result()
    load(tmp_path, (4,), "last dim")


def test_without_no_dist_it_is_refused(tmp_path) -> None:
    """The simulated ranks are no processes: none of them would write its share."""
    with shardwise.simulate(4):
        with pytest.raises(WorldError, match="pass no_dist=True"):
            dcp.save(state(mesh_of((4,)), "first dim"), checkpoint_id=tmp_path)
        save(tmp_path, (4,), "first dim")
        with pytest.raises(WorldError, match="pass no_dist=True"):
            dcp.load(blank(mesh_of((4,)), "last dim"), checkpoint_id=tmp_path)


def test_object_collectives_are_themselves_again_outside() -> None:
    before = dist.gather_object
    with shardwise.simulate(2):
        assert dist.gather_object is not before
        with shardwise.simulate(2):
            pass
        with pytest.raises(WorldError, match="all ranks are in this process"):
            dist.all_gather_object([None, None], "mine")
    assert dist.gather_object is before


def test_a_model(tmp_path) -> None:
    whole = torch.nn.Linear(6, 5)

    def model(mesh, cut):
        linear = torch.nn.Linear(6, 5)
        for name, parameter in list(linear.named_parameters()):
            setattr(linear, name, distribute_tensor(torch.nn.Parameter(parameter.detach()), mesh, cut))
        return linear

    with shardwise.simulate(4):
        first = model(mesh_of((4,)), [Shard(0)])
        for name, parameter in first.named_parameters():
            parameter.data = distribute_tensor(whole.get_parameter(name).detach(), mesh_of((4,)), [Shard(0)])
        dcp.save({"model": first.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    with shardwise.simulate(6):
        mesh = mesh_of((3, 2))
        second = model(mesh, [Replicate(), Shard(0)])
        values = {"model": second.state_dict()}
        dcp.load(values, checkpoint_id=tmp_path, no_dist=True)
        second.load_state_dict(values["model"])
        for name, parameter in second.named_parameters():
            assert isinstance(parameter, torch.nn.Parameter)
            assert parameter.placements == (Replicate(), Shard(0))
            assert torch.equal(parameter.detach().full_tensor().shards[5], whole.get_parameter(name))
        third = model(mesh, [Shard(0), Shard(0)])
        third.load_state_dict(values["model"], assign=True)
        assert third.weight.placements == (Replicate(), Shard(0))
