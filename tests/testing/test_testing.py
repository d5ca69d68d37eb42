"""The testing tools themselves: what they build is right, and what is wrong they find."""

import itertools
import subprocess
import sys
from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise import DTensor, DTensorSpec, P, Partial, RankTensor, Replicate, Shard, distribute_tensor
from shardwise.errors import PlacementError
from shardwise.sharding.placement import REDUCE_OPS
from shardwise.testing import assemble, make_dtensor, operands, strategies
from shardwise.testing.strategies import DTYPES, allowed_ops, integer_values
from shardwise.testing.values import same
from tests.worlds import Recorder, mesh_of

REDUCE = {
    "sum": lambda parts: sum(parts[1:], parts[0]),
    "avg": lambda parts: sum(parts[1:], parts[0]) / len(parts),
    "max": lambda parts: torch.stack(parts).amax(0),
    "min": lambda parts: torch.stack(parts).amin(0),
    "product": lambda parts: torch.stack(parts).prod(0),
}


@pytest.mark.parametrize("op", REDUCE_OPS)
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_operands_reduce_to_the_value(op, count):
    value = integer_values((50,), torch.float32, 1)
    parts = operands(value, count, op, torch.Generator().manual_seed(0))
    assert len(parts) == count
    assert torch.equal(REDUCE[op](parts), value)


@pytest.mark.parametrize("op", REDUCE_OPS)
def test_operands_differ_and_change_sign(op):
    # Each operand differs from the value and from the others, so that leaving one out, or counting it twice, shows.
    value = integer_values((50,), torch.float32, 1)
    parts = operands(value, 3, op, torch.Generator().manual_seed(0))
    for part in parts:
        assert not torch.equal(part, value)
        assert (part < 0).any()
        assert (part > 0).any()
    for one, other in itertools.combinations(parts, 2):
        assert not torch.equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_reduction(dtype):
    value = integer_values((5, 3), dtype, 2)
    with mesh_of(2, 3) as mesh:
        for one, other in itertools.product(allowed_ops(dtype), repeat=2):
            x = make_dtensor(value, mesh, [Partial(one), Partial(other)], seed=0)
            assert same(assemble(x), value)


def test_refuses_reductions_that_mean_nothing():
    with mesh_of(2) as mesh:
        with pytest.raises(PlacementError, match="average"):
            make_dtensor(torch.ones(3, dtype=torch.int64), mesh, [Partial("avg")], seed=0)
        with pytest.raises(PlacementError, match="order"):
            make_dtensor(torch.ones(3, dtype=torch.complex64), mesh, [Partial("max")], seed=0)


def test_inner_axes_reduce_first():
    # max over the rows of the sums over the columns, by hand.
    with mesh_of(2, 2) as mesh:
        local = RankTensor([torch.tensor([float(v)]) for v in (1, 5, 4, 1)])
        x = DTensor.from_local(local, mesh, [Partial("max"), Partial("sum")])
        assert assemble(x).item() == 6  # max(1 + 5, 4 + 1), not max(1, 4) + max(5, 1)
        assert x.full_tensor().shards[0].item() == 6


def test_the_same_seed_gives_the_same_shards():
    value = integer_values((5, 3), torch.float32, 0)
    with mesh_of(2, 3) as mesh:
        first, again, other = (
            make_dtensor(value, mesh, [Partial(), Shard(0)], seed=seed).shards.values() for seed in (0, 0, 1)
        )
        assert all(map(torch.equal, first, again))
        assert not all(map(torch.equal, first, other))


def test_nothing_is_communicated():
    with mesh_of(2, 3) as mesh, Recorder() as recorder:
        assemble(make_dtensor(torch.ones(5, 3), mesh, [Partial(), Shard(0)], seed=0))
        assert not recorder.calls


def test_shards_share_no_memory():
    with mesh_of(4) as mesh:
        x = make_dtensor(torch.zeros(3), mesh, [Replicate()], seed=0)
        x.shards[0].fill_(1)
        assert not x.shards[1].any()


class TestAssembleFinds:
    """Each way a distributed tensor can be broken."""

    def spec(self, mesh, placements):
        return distribute_tensor(torch.arange(8.0), mesh, placements)._spec

    def test_a_wrong_shape(self):
        with mesh_of(2) as mesh:
            x = DTensor(RankTensor([torch.zeros(4), torch.zeros(3)]), self.spec(mesh, [Shard(0)]))
            with pytest.raises(AssertionError, match="rank 1 has \\[3\\], not \\[4\\]"):
                assemble(x)

    def test_a_wrong_dtype(self):
        with mesh_of(2) as mesh:
            x = DTensor(RankTensor([torch.zeros(4).double()] * 2), self.spec(mesh, [Shard(0)]))
            with pytest.raises(AssertionError, match="float64"):
                assemble(x)

    def test_replicas_that_differ(self):
        with mesh_of(2) as mesh:
            x = DTensor(RankTensor([torch.zeros(8), torch.ones(8)]), self.spec(mesh, [Replicate()]))
            with pytest.raises(AssertionError, match="rank 1 differs"):
                assemble(x)

    def test_replicas_that_differ_on_one_axis(self):
        with mesh_of(2, 2) as mesh:
            shards = [torch.full((4,), float(v)) for v in (0, 0, 0, 1)]
            x = DTensor(RankTensor(shards), self.spec(mesh, [Replicate(), Shard(0)]))
            with pytest.raises(AssertionError, match="rank 3 differs"):
                assemble(x)

    def test_nan_is_a_value(self):
        with mesh_of(2) as mesh:
            x = DTensor(RankTensor([torch.full((8,), torch.nan)] * 2), self.spec(mesh, [Replicate()]))
            assert assemble(x).isnan().all()


def test_hypothesis_is_imported_when_it_is_used():
    code = "import sys, shardwise.testing; assert 'hypothesis' not in sys.modules; shardwise.testing.strategies.dtypes"
    code += "; assert 'hypothesis' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- strategies ------------------------------------------------------------------------------------------------------


@settings(max_examples=200)
@given(strategies.redistributions())
def test_redistributions_are_within_bounds(case):
    assert 1 <= case.ranks <= 8
    assert len(case.shape) <= 3
    assert same(case.value(), case.value())
    assert case.value().dtype == case.dtype


@settings(max_examples=100)
@given(st.data())
def test_specs_and_forms(data):
    with mesh_of(2, 3) as mesh:
        spec = data.draw(strategies.specs(mesh))
        assert isinstance(spec, DTensorSpec)
        form = data.draw(strategies.p_forms(("a", "b"), spec.ndim, dtype=spec.dtype))
        assert isinstance(form, P)
        assert DTensorSpec(mesh, form, spec.tensor_meta).ndim == spec.ndim


@pytest.mark.parametrize(
    "wanted",
    [
        lambda case: case.shape == (),
        lambda case: 0 in case.shape,
        lambda case: "Interleaved" in repr(case.source),
        lambda case: "Shard(dim=-" in repr(case.source),
        lambda case: isinstance(case.source, P) and any(isinstance(entry, tuple) for entry in case.source.dims),
        lambda case: "Partial(product)" in repr(case.target),
        lambda case: len(case.mesh_shape) == 3 and case.ranks == 8,
        lambda case: 1 in case.mesh_shape,
    ],
    ids=["0-dim", "empty", "interleaved", "negative", "several-axes", "product", "3-axes", "axis-of-one"],
)
def test_rare_cases_are_drawn(wanted):
    assert any(map(wanted, drawn_cases()))


@lru_cache
def drawn_cases():
    drawn = []

    @settings(max_examples=300)
    @given(strategies.redistributions())
    def collect(case):
        drawn.append(case)

    collect()
    return drawn
