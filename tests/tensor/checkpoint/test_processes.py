"""Saving and loading on real processes, and between them and the simulated world."""

import copy
import itertools
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

import shardwise
from shardwise import DTensor, P, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from shardwise.errors import MeshError, WorldError
from tests.processes.pool import on_processes
from tests.processes.reference import assert_same, mesh_of
from tests.tensor.checkpoint.states import WAYS, WHOLE, blank, check, state

NO_DIST = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")


@on_processes
def save_on_processes(path, sizes, way) -> None:
    dcp.save(state(mesh_of(*sizes), way), checkpoint_id=path)


@on_processes
def load_on_processes(path, sizes, way) -> None:
    mesh = mesh_of(*sizes)
    tensors = blank(mesh, way)
    dcp.load(tensors, checkpoint_id=path)
    check(tensors, mesh, way)


@on_processes
def test_from_mesh_to_mesh(tmp_path) -> None:
    journey = [(2, 2), (4,), (1, 4), (2, 2), (4, 1), (4,)]
    for stop, (here, there) in enumerate(itertools.pairwise(journey)):
        dcp.save(state(mesh_of(*here), WAYS[stop]), checkpoint_id=tmp_path / str(stop))
        mesh, way = mesh_of(*there), WAYS[stop + 1]
        tensors = blank(mesh, way)
        dcp.load(tensors, checkpoint_id=tmp_path / str(stop))
        check(tensors, mesh, way)


@NO_DIST
def test_from_processes_to_the_simulated_world_and_back(tmp_path) -> None:
    save_on_processes(path=tmp_path / "real", sizes=(2, 2), way="backwards")
    with shardwise.simulate(6):
        mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("a", "b"))
        tensors = blank(mesh, "interleaved")
        dcp.load(tensors, checkpoint_id=tmp_path / "real", no_dist=True)
        check(tensors, mesh, "interleaved")
        dcp.save(tensors, checkpoint_id=tmp_path / "simulated", no_dist=True)
    load_on_processes(path=tmp_path / "simulated", sizes=(4,), way="last dim")
    plain = {name: torch.zeros_like(whole) for name, whole in WHOLE.items()}
    dcp.load(plain, checkpoint_id=tmp_path / "real", no_dist=True)
    for name, whole in WHOLE.items():
        assert torch.equal(plain[name], whole)


@on_processes
def test_into_plain_tensors(tmp_path) -> None:
    dcp.save(state(mesh_of(2, 2), "first dim"), checkpoint_id=tmp_path)
    plain = {name: torch.zeros_like(whole) for name, whole in WHOLE.items()}
    dcp.load(plain, checkpoint_id=tmp_path)
    for name, whole in WHOLE.items():
        assert_same(plain[name], whole, name)


@on_processes
def test_partial_is_refused_by_all_ranks_alike(tmp_path) -> None:
    x = distribute_tensor(torch.ones(4), mesh_of(2, 2), [Partial(), Shard(0)])
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"x": x}, checkpoint_id=tmp_path)
    assert "f32[4@b] sum(a) cannot be saved or loaded while it is Partial: no rank holds its" in str(caught.value)


@on_processes
def test_a_tensor_of_a_submesh(tmp_path) -> None:
    # The same tensor in each row of the mesh: its rows are replicas of one another.
    mesh = mesh_of(2, 2)
    whole = torch.arange(10.0).view(5, 2)
    dcp.save({"x": distribute_tensor(whole, mesh["b"], [Shard(0)])}, checkpoint_id=tmp_path)
    loaded = {"x": shardwise.zeros(5, 2, device_mesh=mesh["a"], placements=[Shard(1)])}
    dcp.load(loaded, checkpoint_id=tmp_path)
    assert_same(loaded["x"].full_tensor(), whole)


@on_processes
def test_a_model(tmp_path) -> None:
    def linear(mesh, cut):
        model = torch.nn.Linear(6, 5)
        for name, parameter in list(model.named_parameters()):
            setattr(model, name, distribute_tensor(torch.nn.Parameter(parameter.detach()), mesh, cut))
        return model

    first = linear(mesh_of(4), [Shard(0)])
    dcp.save({"model": first.state_dict()}, checkpoint_id=tmp_path)
    torch.manual_seed(7)
    second = linear(mesh_of(2, 2), [Replicate(), Shard(0)])
    values = {"model": second.state_dict()}
    dcp.load(values, checkpoint_id=tmp_path)
    second.load_state_dict(values["model"])
    for name, parameter in second.named_parameters():
        assert parameter.placements == (Replicate(), Shard(0))
        assert_same(parameter.detach().full_tensor(), first.get_parameter(name).detach().full_tensor(), name)


@on_processes
def test_each_rank_its_own_file(tmp_path) -> None:
    mesh = mesh_of(2, 2)
    whole = torch.arange(35.0).view(7, 5)
    for placements in ([Shard(0), Shard(1)], P(("b", "a")), [Partial(), Replicate()], [Replicate(), Shard(0)]):
        x = torch.nn.Parameter(distribute_tensor(whole, mesh, placements))
        path = tmp_path / f"{dist.get_rank()}.pt"
        torch.save({"x": x}, path)
        for y in (
            torch.load(path, weights_only=True)["x"],
            torch.load(path, weights_only=False)["x"],
            pickle.loads(pickle.dumps(x)),
            copy.deepcopy(x),
        ):
            assert isinstance(y, DTensor)
            assert isinstance(y, torch.nn.Parameter)
            assert y._spec is x._spec
            assert_same(y.detach().to_local(), x.detach().to_local())
            assert_same(y.detach().full_tensor(), whole)


@on_processes
def write_own_files(path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("early", "late"))
    torch.save(distribute_tensor(torch.arange(6.0), mesh, P(("late", "early"))), path / f"{dist.get_rank()}.pt")


@on_processes
def read_own_files(path) -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("other",))
    distribute_tensor(torch.ones(3), mesh, [Shard(0)])
    # Each rank's file, in another run of the program: the mesh is not there yet, or made but not used, or in use.
    y = torch.load(path / f"{dist.get_rank()}.pt", weights_only=True)
    with pytest.raises(
        MeshError, match=r"mesh\(early=2, late=2\) was loaded from a file, and no equal mesh has been used"
    ):
        y.full_tensor()
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("early", "late"))
    x = distribute_tensor(torch.zeros(6), square, P(("late", "early")))
    assert y._spec is x._spec
    assert_same(y.full_tensor(), torch.arange(6.0))
    assert_same(torch.load(path / f"{dist.get_rank()}.pt", weights_only=True).full_tensor(), torch.arange(6.0))


def test_files_of_another_run(tmp_path) -> None:
    from tests.processes import pool

    write_own_files(path=tmp_path)
    pool.restart()
    read_own_files(path=tmp_path)


@on_processes
def test_async_save(tmp_path) -> None:
    mesh = mesh_of(2, 2)
    dcp.async_save(state(mesh, "first dim"), checkpoint_id=tmp_path).result()
    tensors = blank(mesh, "last dim")
    dcp.load(tensors, checkpoint_id=tmp_path)
    check(tensors, mesh, "last dim")


# ---- one rank's file on every rank -----------------------------------------------------------------------------------


def saved_on_rank_zero(value: object, path) -> None:
    if dist.get_rank() == 0:
        torch.save(value, path)
    dist.barrier()


@on_processes
def test_the_file_of_one_rank_loads_where_the_same_shard_belongs(tmp_path) -> None:
    mesh = mesh_of(2, 2)
    whole = torch.arange(35.0).view(7, 5)
    cases = {
        "replicated": ([Replicate(), Replicate()], {0, 1, 2, 3}),
        "sharded over a": ([Shard(0), Replicate()], {0, 1}),
        "sharded over b": ([Replicate(), Shard(1)], {0, 2}),
        "sharded over both": ([Shard(0), Shard(0)], {0}),
        "partial over a": ([Partial(), Replicate()], {0, 1}),
    }
    for name, (placements, loading) in cases.items():
        x = torch.nn.Parameter(distribute_tensor(whole, mesh, placements))
        saved_on_rank_zero({"x": x}, tmp_path / name)
        for weights_only in (True, False):
            if dist.get_rank() in loading:
                y = torch.load(tmp_path / name, weights_only=weights_only)["x"]
                assert y._spec is x._spec
                assert_same(y.detach().to_local(), x.detach().to_local(), name)
            else:
                with pytest.raises(WorldError, match="the file holds the shard at a=0, b=0 of"):
                    torch.load(tmp_path / name, weights_only=weights_only)


@on_processes
def test_the_error_names_what_to_write(tmp_path) -> None:
    model = torch.nn.Linear(3, 8)
    mesh = mesh_of(4)
    for name, parameter in list(model.named_parameters()):
        setattr(model, name, torch.nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
    saved_on_rank_zero(model.state_dict(), tmp_path / "state.pt")
    if dist.get_rank() == 2:
        with pytest.raises(WorldError) as caught:
            torch.load(tmp_path / "state.pt", weights_only=True)
        assert str(caught.value) == (
            "the file holds the shard at a=0 of f32[8@a, 3] on mesh(a=4), but this rank, at a=2, has another shard: "
            "save with torch.distributed.checkpoint, or save x.full_tensor(), or one file for each rank"
        )
    full = {name: parameter.detach().full_tensor() for name, parameter in model.named_parameters()}
    saved_on_rank_zero(full, tmp_path / "full.pt")
    loaded = torch.load(tmp_path / "full.pt", weights_only=True)
    assert all(torch.equal(loaded[name], full[name]) for name in full)


@on_processes
def test_the_file_of_one_row_of_a_mesh_loads_in_the_others(tmp_path) -> None:
    mesh = mesh_of(2, 2)
    whole = torch.arange(10.0)
    same, sharded = distribute_tensor(whole, mesh["b"], [Replicate()]), distribute_tensor(whole, mesh["b"], [Shard(0)])
    saved_on_rank_zero(same, tmp_path / "same.pt")
    saved_on_rank_zero(sharded, tmp_path / "sharded.pt")
    y = torch.load(tmp_path / "same.pt", weights_only=True)
    assert y._spec is same._spec
    if dist.get_rank() in (0, 2):
        assert torch.load(tmp_path / "sharded.pt", weights_only=True)._spec is sharded._spec
    else:
        with pytest.raises(WorldError, match="the file holds the shard at b=0 of"):
            torch.load(tmp_path / "sharded.pt", weights_only=True)


@on_processes
def load_simulated_file(path) -> None:
    mesh = mesh_of(4)
    distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    x = torch.load(path, weights_only=True)
    assert_same(x.to_local(), torch.arange(10.0).chunk(4)[dist.get_rank()])
    assert_same(x.full_tensor(), torch.arange(10.0))


@on_processes
def write_for_simulated(path) -> None:
    mesh = mesh_of(4)
    saved_on_rank_zero(distribute_tensor(torch.arange(10.0), mesh, [Shard(0)]), path / "sharded.pt")
    saved_on_rank_zero(distribute_tensor(torch.arange(10.0), mesh, [Replicate()]), path / "same.pt")


def test_files_between_the_worlds(tmp_path) -> None:
    with shardwise.simulate(4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("a",))
        torch.save(distribute_tensor(torch.arange(10.0), mesh, [Shard(0)]), tmp_path / "simulated.pt")
    load_simulated_file(path=tmp_path / "simulated.pt")
    write_for_simulated(path=tmp_path)
    with shardwise.simulate(4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("a",))
        distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        x = torch.load(tmp_path / "same.pt", weights_only=True)
        assert torch.equal(x.shards[3], torch.arange(10.0))
        with pytest.raises(WorldError, match=r"holds the shard at a=0 of .*, but a simulated world needs all shards"):
            torch.load(tmp_path / "sharded.pt", weights_only=True)
