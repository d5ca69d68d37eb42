"""Where the op is not called on local shards, or not on all of them, its errors are raised nevertheless."""

import pytest
import torch
import torch.nn.functional as F

from shardwise import DTensor, Replicate, Shard
from shardwise.testing import assemble, make_dtensor
from tests.worlds import mesh_of

ONE, NONE, LARGE = torch.ones(1, 1), torch.ones(2, 0), torch.ones(2, 5000)
INVALID = {
    "put into nothing": (lambda x: x.put(torch.ones_like(x.sum(), dtype=torch.int64), x.sum()), NONE),
    "put with a float index": (lambda x: x.put(x.sum(), x.sum()), NONE),
    "put_ with a float index": (lambda x: x.put_(x.sum(), x.sum()), NONE),
    "heaviside of two dtypes": (lambda x: torch.heaviside(x.any(), x), NONE),
    "float classes": (lambda x: F.cross_entropy(x, x[:, 0]), torch.ones(0, 3)),
    "log_softmax of integers": (lambda x: F.log_softmax(x.to(torch.int8), 0), LARGE[:, :2]),
    "log_softmax of many integers": (lambda x: F.log_softmax(x.to(torch.int8), 0), LARGE),
    "min of a complex number": (lambda x: x.to(torch.complex64).min(), ONE),
    "min of complex numbers": (lambda x: x.to(torch.complex64).min(), LARGE[:1]),
    "aminmax of a complex number": (lambda x: torch.aminmax(x.to(torch.complex64)), ONE),
}


@pytest.mark.parametrize("name", INVALID)
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()])
def test_the_error_is_that_of_one_device(name, placement):
    function, value = INVALID[name]
    if name == "float classes" and torch.__version__ < (2, 13):
        pytest.skip("PyTorch 2.11 does not look at the classes if there are none")
    with pytest.raises((RuntimeError, IndexError)) as plain:
        function(value.clone())
    with mesh_of(2) as mesh, pytest.raises(type(plain.value)):
        function(make_dtensor(value, mesh, [placement], seed=0))


def test_zeros_are_not_taken_for_the_data():
    matrix = torch.eye(2)
    with mesh_of(2) as mesh:
        x, columns = (make_dtensor(value, mesh, [Shard(0)], seed=0) for value in (matrix, matrix[:, :0]))
        assert torch.linalg.solve(x, columns).shape == (2, 0)
        numbers = make_dtensor(torch.tensor([6]), mesh, [Shard(0)], seed=0)
        assert assemble(numbers // (numbers - 4)).tolist() == [3]


@pytest.mark.parametrize("shape", [(1, 0), (0, 1), (2, 0, 3)])
@pytest.mark.parametrize("placement", [Shard(0), Replicate()])
def test_norms_of_empty_matrices_are_distributed(shape, placement):
    value, compared = torch.ones(shape), 0
    with mesh_of(2) as mesh:
        x = make_dtensor(value, mesh, [placement], seed=0)
        for function in (torch.linalg.matrix_norm, torch.linalg.norm, torch.linalg.cond):
            for order in (1, 2, torch.inf, "fro"):
                try:
                    expected = function(value, order)
                except (RuntimeError, IndexError):
                    continue
                result = function(x, order)
                assert isinstance(result, DTensor)
                torch.testing.assert_close(assemble(result), expected)
                compared += 1
    assert compared > 2
