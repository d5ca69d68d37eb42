"""Errors that depend on data are those of one device, and what one device accepts is accepted."""

import pytest
import torch
import torch.nn.functional as F

from shardwise import DTensor, Replicate, Shard
from shardwise.testing import assemble, check, make_dtensor
from tests.worlds import mesh_of

NAN, INF = float("nan"), float("inf")
INVALID = [
    (lambda x: F.one_hot(x.long(), 3), [0, 5, 2]),
    (lambda x: F.one_hot(x.long()), [0, -1, 2]),
    (lambda x: F.one_hot(x.long(), 0), [0, 1, 2]),
    (torch.bernoulli, [0.0, 1.0, 1.5]),
    (torch.bernoulli, [0.0, NAN, 0.5]),
    (lambda x: torch.empty_like(x).bernoulli_(x), [0.5, -0.5, 0.5]),
    (lambda x: torch.normal(x, x), [1.0, 2.0, -1.0]),
    (lambda x: torch.normal(0.0, x), [1.0, 2.0, -1.0]),
    (lambda x: torch.multinomial(x, 1), [1.0, 2.0, -1.0]),
    (lambda x: torch.multinomial(x, 1), [0.0, 0.0, 0.0]),
    (lambda x: torch.multinomial(x, 1), [1.0, INF, 1.0]),
    (lambda x: torch.multinomial(x, 2, replacement=True), [1.0, NAN, 1.0]),
    (lambda x: torch.multinomial(x, 5), [1.0, 2.0, 1.0]),
    (lambda x: torch.multinomial(x, 0), [1.0, 2.0, 1.0]),
    (lambda x: torch.block_diag(x[None, None]), [1.0, 2.0, 1.0]),
    (lambda x: torch.bitwise_not(x[:0]), [1.0, 2.0, 1.0]),
    (lambda x: torch.vander(x, -1), [1.0, 2.0, 1.0]),
]


@pytest.mark.parametrize(("function", "data"), INVALID, ids=range(len(INVALID)))
@pytest.mark.parametrize("placement", [Shard(0), Replicate()])
def test_invalid_data_raises(function, data, placement):
    value = torch.tensor(data)
    with pytest.raises(RuntimeError) as plain:
        function(value)
    with mesh_of(2) as mesh, pytest.raises(type(plain.value)):
        function(make_dtensor(value, mesh, [placement], seed=0))


def test_one_hot_of_valid_classes():
    check(lambda x: F.one_hot(x, 5), torch.tensor([[0, 4, 2], [1, 1, 3]]), grad=False)
    check(lambda x: F.one_hot(x), torch.tensor([0, 4, 2]), grad=False)
    check(lambda x: F.one_hot(x, 4), torch.zeros(0, 3, dtype=torch.int64), grad=False)


def test_vander():
    check(torch.vander, torch.tensor([1.0, 2.0, -3.0, 0.5, 1.5]), grad=False)  # plain tensors have no gradient of it
    check(lambda x: torch.vander(x, 3, increasing=True), torch.tensor([1.0, 2.0, -3.0, 0.5, 1.5]), grad=False)
    check(lambda x: torch.vander(x, 0), torch.tensor([1.0, 2.0]), grad=False)
    check(torch.vander, torch.tensor([1, 2, 3], dtype=torch.int32), grad=False)


PARTS = {
    "unbind": lambda x: x.unbind(0)[1],
    "chunk": lambda x: x.chunk(3, 1)[1],
    "split_with_sizes": lambda x: x.split([1, 2], 1)[1],
    "split": lambda x: x.split(2)[0],
    "tile": lambda x: (x * 1).tile((0,)),
    "repeat": lambda x: (x * 1).repeat(0, 1),
}


@pytest.mark.parametrize("name", PARTS)
def test_gradients_of_parts(name):
    check(PARTS[name], torch.randn(4, 3))


def test_tensors_made_from_sizes_or_numbers_are_distributed():
    with mesh_of(2) as mesh:
        x = make_dtensor(torch.randn(4, 3), mesh, [Shard(0)], seed=0)
        made = x.new_tensor([[1, 2], [3, 4]], requires_grad=True)
        assert isinstance(made, DTensor)
        assert made.placements == (Replicate(),)
        assert made.requires_grad
        assert torch.equal(assemble(made), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        assert x.new_tensor([1, 2], dtype=torch.int32).dtype is torch.int32
        nothing = torch.trapezoid(x[:, :0], dim=1)
        assert isinstance(nothing, DTensor)
        assert torch.equal(assemble(nothing), torch.zeros(4))


def test_tolist_of_a_tensor_that_requires_grad():
    with mesh_of(2) as mesh:
        x = make_dtensor(torch.arange(3.0), mesh, [Shard(0)], seed=0).requires_grad_()
        assert x.tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("size", [1, 5])
def test_values_and_places_travel_together(ranks, size):
    value = torch.randn(size)
    with mesh_of(ranks) as mesh:
        x = make_dtensor(value, mesh, [Shard(0)], seed=0)
        assert torch.equal(assemble(x.cummax(0).indices), value.cummax(0).indices)
        assert torch.equal(assemble(x.topk(1, 0).values), value.topk(1, 0).values)


def test_batch_norm_without_running_statistics():
    check(lambda x: F.batch_norm(x, None, None, training=True), torch.randn(4, 3, 5))
    check(lambda x, w: F.batch_norm(x, None, None, w, training=True), torch.randn(4, 3), torch.randn(3))


def test_second_derivative_of_glu():
    def second(x):
        first = torch.autograd.grad(F.glu(x, 0).square().sum(), x, create_graph=True)[0]
        return torch.autograd.grad(first.square().sum(), x)[0]

    value = torch.randn(4)
    with mesh_of(2) as mesh:
        x = make_dtensor(value, mesh, [Shard(0)], seed=0).requires_grad_()
        torch.testing.assert_close(assemble(second(x)), second(value.clone().requires_grad_()))
