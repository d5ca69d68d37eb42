"""How ranks hold a tensor, and how it differs from what it should be, found from values alone."""

import itertools

import pytest
import torch

from shardwise.verifying.cause import find_cause
from shardwise.verifying.distribution import explain
from shardwise.verifying.ranks import Axes, Ranks
from shardwise.verifying.tolerance import closeness

AXES = Axes(("dp", "tp"), (2, 3))
CLOSE = closeness(1e-9)
X = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def grid(function) -> Ranks:
    """What the rank at each coordinate holds."""
    return Ranks(AXES.names, {at: function(*at) for at in AXES.coordinates()})


def parts(count: int) -> list[torch.Tensor]:
    """Tensors that add up to X."""
    first = [torch.randn(6, 4, dtype=torch.float64) for _ in range(count - 1)]
    return [*first, X - sum(first)]


# ---- distributions ---------------------------------------------------------------------------------------------------


def test_replicated():
    found = explain(grid(lambda dp, tp: X), X, CLOSE, partial=True)
    assert dict(found.placements) == {"dp": "Replicate()", "tp": "Replicate()"}


def test_shards_of_different_dims():
    held = grid(lambda dp, tp: X.chunk(3)[tp].chunk(2, 1)[dp])
    assert str(explain(held, X, CLOSE, partial=True)) == "Shard(1) over dp, Shard(0) over tp"


@pytest.mark.parametrize("outer", ["dp", "tp"])
def test_two_axes_shard_one_dim_in_either_order(outer):
    held = grid(lambda dp, tp: X.chunk(2)[dp].chunk(3)[tp] if outer == "dp" else X.chunk(3)[tp].chunk(2)[dp])
    assert str(explain(held, X, CLOSE, partial=False)) == "Shard(0) over dp, Shard(0) over tp"


def test_uneven_shards():
    x = X[:5]
    held = grid(lambda dp, tp: (*x.chunk(3), x[:0])[tp])
    assert str(explain(held, x, CLOSE, partial=False)) == "Shard(0) over tp"


def test_parts_of_a_sum_and_of_an_average():
    of_sum, of_average = parts(3), [2 * part for part in parts(2)]
    found = explain(grid(lambda dp, tp: of_sum[tp]), X, CLOSE, partial=True)
    assert found.partial == ("tp",)
    assert explain(grid(lambda dp, tp: of_sum[tp]), X, CLOSE, partial=False) is None
    assert explain(grid(lambda dp, tp: of_average[dp]), X, CLOSE, partial=True).averaged == ("dp",)


def test_another_order_of_rows():
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    found = explain(grid(lambda dp, tp: X[order].chunk(3)[tp]), X, CLOSE, partial=False)
    assert found.permuted
    assert not found.unsharded


def test_no_simple_distribution():
    assert explain(grid(lambda dp, tp: X + tp), X, CLOSE, partial=True) is None


# ---- causes ----------------------------------------------------------------------------------------------------------


def cause(function, wanted=lambda dp, tp: X):
    return find_cause(grid(function), grid(wanted), CLOSE, AXES)


@pytest.mark.parametrize(
    ("factor", "text"),
    [
        (3.0, "is tp times too large (3 is the size of tp)"),
        (1 / 2, "is dp times too small (2 is the size of dp)"),
        (6.0, "is dp x tp times too large (6 is the size of dp x tp)"),
        (3.0**0.5, "is 1.73205 times too large, which is the square root of the size of tp"),
        (1.25, "is 1.25 times too large"),
        (-1.0, "its sign is wrong"),
    ],
)
def test_factors(factor, text):
    found = cause(lambda dp, tp: factor * X)
    assert found.pattern == "factor"
    assert text in found.text


def test_a_factor_that_two_axes_have():
    axes = Axes(("dp", "tp"), (2, 2))
    same = dict.fromkeys(axes.coordinates(), X)
    twice = dict.fromkeys(axes.coordinates(), 2 * X)
    found = find_cause(Ranks(axes.names, twice), Ranks(axes.names, same), CLOSE, axes)
    assert found.text == "is 2 times too large (2 is the size of dp or tp)"


def test_missing_reductions():
    of_sum, of_average = parts(3), [2 * part for part in parts(2)]
    assert (cause(lambda dp, tp: of_sum[tp]).pattern, cause(lambda dp, tp: of_sum[tp]).axes) == ("sum", ("tp",))
    assert cause(lambda dp, tp: of_average[dp]).pattern == "average"
    both = dict(zip(itertools.product(range(2), range(3)), parts(6), strict=True))
    assert cause(lambda dp, tp: both[dp, tp]).axes == ("dp", "tp")
    twice = cause(lambda dp, tp: 2 * of_sum[tp])
    assert "the sum over tp is dp times too large" in twice.text


def test_a_norm_of_local_parts():
    squares = torch.tensor([1.0, 4.0, 11.0], dtype=torch.float64)
    found = cause(lambda dp, tp: squares[tp].sqrt(), lambda dp, tp: torch.tensor(4.0, dtype=torch.float64))
    assert (found.pattern, found.axes) == ("root", ("tp",))


def test_ranks_that_differ():
    found = cause(lambda dp, tp: X + (tp == 2) * X[0])
    assert (found.pattern, found.axes) == ("ranks differ", ("tp",))
    assert "the rank at dp=0, tp=0" in found.text


def test_elements():
    mask = torch.rand(6, 4, generator=torch.Generator().manual_seed(1)) > 0.5
    other = torch.rand(6, 4, generator=torch.Generator().manual_seed(2)) > 0.5
    assert cause(lambda dp, tp: X * mask, lambda dp, tp: X * other).pattern == "zeros"
    rows = X.clone()
    rows[4:] += 1
    assert "differs in rows 4 to 5 of 6 in dim 0 only" in cause(lambda dp, tp: rows).text
    assert cause(lambda dp, tp: X.flip(0)).pattern == "permuted"
    assert cause(lambda dp, tp: X.sqrt()).pattern == "nan"
    assert cause(lambda dp, tp: X[:3]).pattern == "shape"
    assert cause(lambda dp, tp: X.cos()).pattern == "other"
