"""pickle, deepcopy, torch.save: a tensor comes back with its mesh, if the world it comes back to has that mesh."""

import copy
import io
import pickle

import pytest
import torch

import shardwise
from shardwise import (
    DeviceMesh,
    DTensor,
    InterleavedShard,
    P,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from shardwise.errors import MeshError, WorldError
from tests.worlds import fake_group

WHOLE = torch.arange(15.0).view(5, 3)
CUTS = [
    [Shard(0), Shard(1)],
    [Shard(0), Replicate()],
    [Partial(), Replicate()],
    [InterleavedShard(1, 3), Partial("max")],
    P(("tp", "dp")),
]


def mesh_of(*sizes: int):
    return init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[: len(sizes)])


def saved(value: object) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def copies(x: DTensor) -> dict[str, DTensor]:
    return {
        "pickle": pickle.loads(pickle.dumps(x)),
        "deepcopy": copy.deepcopy(x),
        "save": torch.load(saved(x), weights_only=False),
        "save, weights only": torch.load(saved(x), weights_only=True),
    }


@pytest.mark.parametrize("placements", CUTS, ids=str)
def test_everything_comes_back(placements) -> None:
    with shardwise.simulate(4):
        mesh = mesh_of(2, 2)
        for requires_grad in (False, True):
            x = distribute_tensor(WHOLE, mesh, placements).requires_grad_(requires_grad)
            for how, y in copies(x).items():
                assert type(y) is DTensor, how
                assert y._spec is x._spec, how
                assert y.device_mesh is x.device_mesh, how
                assert y.requires_grad == requires_grad, how
                assert y.is_leaf, how
                for rank, shard in x.shards.items():
                    assert torch.equal(y.shards[rank], shard), how
                    assert y.shards[rank].data_ptr() != shard.data_ptr() or not shard.numel(), how


def test_parameters_stay_parameters() -> None:
    with shardwise.simulate(4):
        parameter = torch.nn.Parameter(distribute_tensor(WHOLE, mesh_of(4), [Shard(0)]), requires_grad=False)
        for how, y in copies(parameter).items():
            assert isinstance(y, torch.nn.Parameter), how
            assert isinstance(y, DTensor), how
            assert not y.requires_grad, how


def test_copies_take_gradients_of_their_own() -> None:
    with shardwise.simulate(4):
        x = distribute_tensor(WHOLE, mesh_of(4), [Shard(0)]).requires_grad_()
        x.full_tensor().sum().backward()
        y = copy.deepcopy(x)
        assert torch.equal(y.grad.full_tensor().shards[0], torch.ones(5, 3))
        y.full_tensor().sum().backward()
        assert torch.equal(y.grad.full_tensor().shards[0], torch.full((5, 3), 2.0))
        assert torch.equal(x.grad.full_tensor().shards[0], torch.ones(5, 3))
        assert y.grad.placements == (Shard(0),)


def test_what_is_shared_stays_shared() -> None:
    with shardwise.simulate(4):
        x = distribute_tensor(WHOLE, mesh_of(4), [Shard(0)])
        for one, other in (copy.deepcopy([x, x]), pickle.loads(pickle.dumps([x, x]))):
            assert one is other


def test_values() -> None:
    values = [Shard(0), Replicate(), Partial("avg"), InterleavedShard(1, 3)]
    assert torch.load(saved(values), weights_only=True) == values
    values.append(P("dp", ("tp",), partial={"cp": "sum"}))
    assert pickle.loads(pickle.dumps(values)) == values
    assert copy.deepcopy(values) == values


def test_a_spec_comes_back_as_the_same_object() -> None:
    with shardwise.simulate(4):
        spec = distribute_tensor(WHOLE, mesh_of(2, 2), P(("tp", "dp")))._spec
        assert pickle.loads(pickle.dumps(spec)) is spec
        assert copy.deepcopy(spec) is spec
        assert copy.copy(spec) is spec


def test_modules() -> None:
    with shardwise.simulate(4):
        mesh = mesh_of(4)
        model = torch.nn.Linear(3, 5)
        for name, parameter in list(model.named_parameters()):
            setattr(model, name, torch.nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
        state = torch.load(saved(model.state_dict()), weights_only=True)
        twin = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.copy_(shardwise.zeros(parameter.shape, device_mesh=mesh, placements=[Replicate()]))
        twin.load_state_dict(state)
        whole = pickle.loads(pickle.dumps(model))
        for name, parameter in model.named_parameters():
            assert isinstance(twin.get_parameter(name), torch.nn.Parameter)
            for other in (twin.get_parameter(name), whole.get_parameter(name)):
                for rank, shard in parameter.shards.items():
                    assert torch.equal(other.shards[rank], shard)


# ---- ranks outside the mesh ------------------------------------------------------------------------------------------


def of_two_ranks(rank: int, placement: Placement, data: io.BytesIO | None = None) -> tuple[DTensor, io.BytesIO]:
    """A tensor on ranks 0 and 1 of four, made or loaded by any rank of them, and its file."""
    with fake_group(4, rank):
        mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))
        made = DTensor.from_local(torch.ones(2, 3), mesh, [placement])
        if data is None:
            return made, saved(made)
        data.seek(0)
        loaded = torch.load(data, weights_only=True)
        assert loaded._spec is made._spec
        return loaded, data


@pytest.mark.parametrize("placement", [Shard(0), Replicate()])
def test_a_rank_outside_the_mesh_does_not_load_a_shard(placement: Placement) -> None:
    for rank in (0, 1):
        data = of_two_ranks(rank, placement)[1]
        assert of_two_ranks(rank, placement, data)[0].to_local().shape == (2, 3)
        with pytest.raises(WorldError, match=f"the file holds the shard at tp={rank} .*this rank is not in that mesh"):
            of_two_ranks(2, placement, data)


@pytest.mark.parametrize("placement", [Shard(0), Replicate()])
def test_the_file_of_a_rank_outside_the_mesh_loads_on_such_ranks_only(placement: Placement) -> None:
    data = of_two_ranks(2, placement)[1]
    for rank in (2, 3):
        assert of_two_ranks(rank, placement, data)[0].to_local().shape == (0,)
    for rank in (0, 1):
        with pytest.raises(WorldError, match="saved by a rank that is not in mesh"):
            of_two_ranks(rank, placement, data)


# ---- another world ---------------------------------------------------------------------------------------------------


def test_a_mesh_that_was_made_but_not_used_yet() -> None:
    with shardwise.simulate(4):
        data = pickle.dumps(distribute_tensor(WHOLE, mesh_of(2, 2), [Shard(0), Shard(1)]))
    with shardwise.simulate(4):
        x = pickle.loads(data)
        assert torch.equal(x.full_tensor().shards[2], WHOLE)  # processes would need the groups of the mesh
        assert x.shape == (5, 3)
        assert x.placements == (Shard(0), Shard(1))
        y = distribute_tensor(WHOLE, mesh_of(2, 2), [Shard(0), Shard(1)])  # the mesh has its groups now
        assert x._spec is y._spec
        assert torch.equal(x.full_tensor().shards[2], WHOLE)


def test_a_mesh_that_is_in_use() -> None:
    with shardwise.simulate(4):
        data = pickle.dumps(distribute_tensor(WHOLE, mesh_of(2, 2), [Shard(0), Shard(1)]))
    with shardwise.simulate(4):
        y = distribute_tensor(WHOLE + 1, mesh_of(2, 2), [Shard(0), Shard(1)])
        x = pickle.loads(data)
        assert x._spec is y._spec
        assert torch.equal((y + x).full_tensor().shards[3], 2 * WHOLE + 1)


def test_no_world_at_all() -> None:
    with shardwise.simulate(4):
        x = distribute_tensor(WHOLE, mesh_of(4), [Shard(0)])
        data = [pickle.dumps(x), saved(x)]
    told = "there is no world: torch.distributed is not initialised"
    with pytest.raises(MeshError, match=told):
        pickle.loads(data[0])
    with pytest.raises(MeshError, match=told):
        torch.load(data[1], weights_only=True)


def test_a_world_of_another_size() -> None:
    with shardwise.simulate(4):
        data = pickle.dumps(distribute_tensor(WHOLE, mesh_of(4), [Shard(0)]))
    with shardwise.simulate(2), pytest.raises(MeshError) as caught:
        pickle.loads(data).full_tensor()
    assert str(caught.value) == (
        "mesh(dp=4) has the ranks [0, 1, 2, 3], but this world has 2: "
        "use a mesh of ranks that exist; shardwise.checkpoint loads a saved tensor onto another mesh"
    )
