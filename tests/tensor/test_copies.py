"""Printing, copying, pickling, saving, and taking apart for the compiler: the tensor that comes back is the same."""

import copy
import io
import itertools
import pickle

import pytest
import torch

from shardwise import DTensor, InterleavedShard, P, Partial, Replicate, Shard, distribute_tensor, zeros
from shardwise.errors import InputError
from shardwise.testing import assemble, make_dtensor
from shardwise.testing.values import same
from tests.worlds import mesh_of

PLACEMENTS = [
    *itertools.product([Shard(0), Shard(1), Replicate(), Partial(), Partial("max")], repeat=2),
    P(("b", "a")),
    (Replicate(), InterleavedShard(0, 2)),
]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


@pytest.fixture
def mesh():
    with mesh_of(2, 3) as mesh:
        yield mesh


def numbers(shape=(6, 5), dtype=torch.float32):
    return torch.randint(0, 20, shape).to(dtype)


def weights_only(x):
    file = io.BytesIO()
    torch.save(x, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def full_load(x):
    file = io.BytesIO()
    torch.save(x, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def flat(x):
    names, context = x.__tensor_flatten__()
    inner = {name: getattr(x, name) for name in names}
    return DTensor.__tensor_unflatten__(inner, context, x.size(), x.stride())


WAYS = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "weights-only": weights_only,
    "torch.load": full_load,
    "flatten": flat,
}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())


@ways
@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
def test_round_trip(mesh, way, placements):
    value = numbers()
    x = make_dtensor(value, mesh, placements, seed=0)
    y = way(x)
    assert type(y) is DTensor
    assert y is not x
    assert y._spec is x._spec
    assert torch.equal(assemble(y), value)


@ways
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (1, 2)], ids=str)
def test_round_trip_of_dtypes_and_shapes(mesh, way, dtype, shape):
    value = numbers(shape, dtype)
    x = make_dtensor(value, mesh, [Partial(), Shard(0) if shape else Replicate()], seed=0)
    assert same(assemble(way(x)), value)


@ways
def test_round_trip_keeps_requires_grad_and_leaf(mesh, way):
    for requires_grad in (False, True):
        x = make_dtensor(numbers(), mesh, [Shard(0), Replicate()], seed=0).requires_grad_(requires_grad)
        y = way(x)
        assert (y.requires_grad, y.is_leaf) == (requires_grad, True)


@ways
def test_the_gradient_of_a_copy_takes_its_placements(mesh, way):
    x = make_dtensor(numbers(), mesh, [Shard(0), Replicate()], seed=0).requires_grad_()
    y, w = way(x), numbers()
    (y.redistribute(placements=[Shard(1), Shard(0)]).full_tensor() * w).sum().backward()
    assert y.grad.placements == x.placements
    assert torch.equal(assemble(y.grad), w)
    assert x.grad is None


@ways
def test_parameters_stay_parameters(mesh, way):
    for requires_grad in (False, True):
        p = torch.nn.Parameter(make_dtensor(numbers(), mesh, [Shard(0), Shard(1)], seed=0), requires_grad)
        q = way(p)
        if way is not flat:  # the compiler keeps track of parameters itself
            assert isinstance(q, torch.nn.Parameter)
        assert q.requires_grad == requires_grad
        assert torch.equal(assemble(q.detach()), assemble(p.detach()))


@pytest.mark.parametrize(
    "way", [copy.deepcopy, WAYS["pickle"], weights_only], ids=["deepcopy", "pickle", "weights-only"]
)
def test_copies_have_memory_of_their_own(mesh, way):
    x = distribute_tensor(torch.zeros(6), mesh, [Shard(0), Replicate()])
    y = way(x)
    for shard in y.shards.values():
        shard.fill_(1)
    assert not assemble(x).any()


class TestDeepcopy:
    def test_with_grad(self, mesh):
        w = numbers()
        x = make_dtensor(numbers(), mesh, [Shard(0), Shard(1)], seed=0).requires_grad_()
        (x.full_tensor() * w).sum().backward()
        y = copy.deepcopy(x)
        assert y.grad is not x.grad
        assert y.grad.placements == x.placements
        assert torch.equal(assemble(y.grad), w)

    def test_parameter_with_grad(self, mesh):
        w = numbers()
        p = torch.nn.Parameter(make_dtensor(numbers(), mesh, [Shard(0), Shard(1)], seed=0))
        (p.full_tensor() * w).sum().backward()
        q = copy.deepcopy(p)
        assert isinstance(q, torch.nn.Parameter)
        assert torch.equal(assemble(q.grad), w)

    def test_shared_tensors_stay_shared(self, mesh):
        # Tied weights are one tensor before and after.
        x = make_dtensor(numbers(), mesh, [Shard(0), Shard(1)], seed=0)
        one, other = copy.deepcopy([x, x])
        assert one is other
        assert one is not x

    def test_module(self, mesh):
        module = torch.nn.Linear(5, 6)
        module.weight = torch.nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [Shard(0), Replicate()]))
        copied = copy.deepcopy(module)
        assert copied.weight is not module.weight
        assert torch.equal(assemble(copied.weight.detach()), assemble(module.weight.detach()))

    def test_of_a_result_is_refused(self, mesh):
        x = make_dtensor(numbers(), mesh, [Shard(0), Shard(1)], seed=0).requires_grad_()
        with pytest.raises(InputError, match="not a leaf"):
            copy.deepcopy(x.redistribute(placements=[Replicate(), Replicate()]))

    def test_of_a_pending_result(self, mesh):
        value = numbers()
        x = make_dtensor(value, mesh, [Partial(), Shard(0)], seed=0)
        y = copy.deepcopy(x.redistribute(placements=[Shard(1), Shard(0)], async_op=True))
        assert torch.equal(assemble(y), value)

    def test_copy_shares_the_data(self, mesh):
        x = distribute_tensor(torch.zeros(6), mesh, [Shard(0), Replicate()])
        y = copy.copy(x)
        assert y is not x
        for shard in y.shards.values():
            shard.fill_(1)
        assert assemble(x).all()


def test_state_dict_through_a_file(mesh):
    state = {
        "weight": make_dtensor(numbers(), mesh, [Shard(0), Replicate()], seed=0),
        "order": make_dtensor(numbers(), mesh, P(("b", "a")), seed=0),
        "step": torch.tensor(3),
    }
    loaded = weights_only(state)
    assert loaded.keys() == state.keys()
    assert loaded["step"].item() == 3
    for name in ("weight", "order"):
        assert loaded[name]._spec is state[name]._spec
        assert torch.equal(assemble(loaded[name]), assemble(state[name]))


def test_loading_in_a_later_world():
    # The mesh of the file is found again by its description once a mesh like it is in use.
    file = io.BytesIO()
    value = numbers()
    with mesh_of(2, 3) as mesh:
        torch.save(make_dtensor(value, mesh, [Shard(0), Shard(1)], seed=0), file)
    with mesh_of(2, 3) as mesh:
        zeros(1, device_mesh=mesh)
        x = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        assert x.device_mesh is mesh
        assert torch.equal(assemble(x.redistribute(placements=[Replicate(), Replicate()])), value)


class TestRepr:
    def test_says_spec_mesh_and_local_parts(self, mesh):
        x = distribute_tensor(torch.arange(6.0), mesh, [Shard(0), Replicate()])
        text = repr(x)
        assert text.startswith("DTensor(f32[6@a] on mesh(a=2, b=3), local=")
        assert "tensor([0., 1., 2.])" in text
        assert "tensor([3., 4., 5.])" in text
        assert str(x) == text

    def test_says_what_autograd_knows(self, mesh):
        x = make_dtensor(numbers(), mesh, [Shard(0), Replicate()], seed=0).requires_grad_()
        assert ", requires_grad=True," in repr(x)
        assert "grad_fn=<" in repr(x.redistribute(placements=[Replicate(), Replicate()]))

    @pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
    def test_holds_the_printed_spec(self, mesh, placements):
        x = make_dtensor(numbers(), mesh, placements, seed=0)
        assert repr(x._spec) in repr(x)

    def test_format(self, mesh):
        x = make_dtensor(torch.tensor(2.5), mesh, [Partial(), Replicate()], seed=0)
        assert f"{x:.2f}" == "2.50"
        assert f"{x}" == repr(x)


def test_flatten_names_the_inner_tensor(mesh):
    x = make_dtensor(numbers(), mesh, [Shard(0), Partial()], seed=0)
    names, context = x.__tensor_flatten__()
    assert names == ["_local_tensor"]
    assert hash(context) == hash(flat(x).__tensor_flatten__()[1])  # the compiler keys on it


def test_leaving_for_python(mesh):
    value = numbers()
    for placements in ([Shard(0), Shard(1)], [Partial(), Replicate()]):
        x = make_dtensor(value, mesh, placements, seed=0)
        assert x.tolist() == value.tolist()
        assert (x.numpy() == value.numpy()).all()
