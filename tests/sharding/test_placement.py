"""Placements and P: values that print, compare and refuse nonsense."""

import copy
import pickle

import pytest
from torch.distributed.tensor.placement_types import _StridedShard as TorchStridedShard

from shardwise import InterleavedShard, P, Partial, Placement, Replicate, Shard, ShardOrderEntry
from shardwise.errors import InputError, PlacementError
from shardwise.sharding.placement import REDUCE_OPS, AnyShard, OrderedShard

ALL = [Shard(0), Shard(-1), InterleavedShard(1, 3), Replicate(), *map(Partial, REDUCE_OPS)]


@pytest.mark.parametrize(
    ("placement", "text"),
    [
        (Shard(2), "Shard(dim=2)"),
        (Shard(-1), "Shard(dim=-1)"),
        (InterleavedShard(0, 3), "InterleavedShard(dim=0, blocks=3)"),
        (Replicate(), "Replicate()"),
        (Partial(), "Partial(sum)"),
        (Partial("max"), "Partial(max)"),
    ],
)
def test_prints(placement, text):
    assert repr(placement) == text


def test_equality_is_by_kind_and_value():
    # An interleaved shard is never equal to a plain one: the ranks hold other elements.
    assert len({*ALL, *ALL}) == len(ALL)
    assert Shard(0) == Shard(0) != Shard(1)
    assert InterleavedShard(0, 1) != Shard(0)
    assert Partial() == Partial("sum") != Partial("avg")


@pytest.mark.parametrize("placement", ALL, ids=repr)
def test_is_exactly_one_kind(placement):
    assert isinstance(placement, Placement)
    kinds = [isinstance(placement, AnyShard), placement.is_replicate(), placement.is_partial()]
    assert kinds.count(True) == 1


def test_only_chunks_say_that_they_are_shards():
    # As PyTorch's strided shards: programs that ask, such as the loader of transformers, then read one chunk.
    assert Shard(1).is_shard()
    assert not isinstance(InterleavedShard(1, 2), Shard)
    assert not InterleavedShard(1, 2).is_shard()
    assert not OrderedShard(1, 0).is_shard()
    assert not TorchStridedShard(1, split_factor=2).is_shard()


def test_prod_is_another_name_of_product():
    assert Partial("prod") is Partial("product")
    assert Partial("prod").reduce_op == "product"
    assert Partial("product").is_partial("prod")
    assert not Partial().is_partial("prod")
    placements, _ = P(partial={"tp": "prod"}).resolve(("dp", "tp"), 1)
    assert placements == (Replicate(), Partial("product"))


def test_questions_with_an_argument():
    assert Shard(1).is_shard(1)
    assert not Shard(1).is_shard(0)
    assert not InterleavedShard(1, 2).is_shard(1)
    assert Partial("max").is_partial("max")
    assert not Partial("max").is_partial("sum")
    assert not Replicate().is_shard(0)
    assert not Replicate().is_partial("sum")


@pytest.mark.parametrize(
    ("placement", "field"), [(Shard(0), "dim"), (InterleavedShard(0, 2), "blocks"), (Partial(), "reduce_op")], ids=repr
)
def test_frozen(placement, field):
    before = getattr(placement, field)
    with pytest.raises(AttributeError, match="frozen"):
        setattr(placement, field, 1)
    assert getattr(placement, field) == before


@pytest.mark.parametrize("placement", ALL, ids=repr)
def test_copies_are_equal(placement):
    for copied in (copy.copy(placement), copy.deepcopy(placement), pickle.loads(pickle.dumps(placement))):
        assert type(copied) is type(placement)
        assert copied == placement
        assert hash(copied) == hash(placement)


@pytest.mark.parametrize(
    ("kind", "arguments", "error"),
    [
        (Shard, ("0",), InputError),
        (Shard, (True,), InputError),  # which would mean dim 1
        (Shard, (0.0,), InputError),
        (InterleavedShard, (0, 0), InputError),
        (Partial, ("mean",), PlacementError),
        (P, (0,), InputError),
        (P, (("a", None),), InputError),
    ],
)
def test_refuses(kind, arguments, error):
    with pytest.raises(error):
        kind(*arguments)


class TestP:
    def test_prints_as_written(self):
        assert repr(P("dp", ("tp", "cp"), None)) == "P('dp', ('tp', 'cp'), None)"
        assert repr(P(None, partial={"ep": "max"})) == "P(None, partial={'ep': 'max'})"
        assert repr(P()) == "P()"

    def test_equality_and_hash(self):
        assert P("a", partial={"b": "sum", "c": "max"}) == P("a", partial={"c": "max", "b": "sum"})
        assert hash(P("a", partial={"b": "sum", "c": "max"})) == hash(P("a", partial={"c": "max", "b": "sum"}))
        assert P("a") != P("b")
        assert P("a") != P("a", None)
        assert P(("a", "b")) != P(("b", "a"))

    @pytest.mark.parametrize(
        ("form", "placements", "order"),
        [
            (P("dp", ("tp", "cp")), (Shard(0), Shard(1), Shard(1)), {0: (0,), 1: (2, 1)}),
            (P(None, "cp"), (Replicate(), Shard(1), Replicate()), {1: (1,)}),
            (P(), (Replicate(),) * 3, {}),
            (P(None, None, None), (Replicate(),) * 3, {}),
            (P(("tp",)), (Replicate(), Replicate(), Shard(0)), {0: (2,)}),
            (P(None, "tp", partial={"dp": "avg"}), (Partial("avg"), Replicate(), Shard(1)), {1: (2,)}),
            (P((), "dp"), (Shard(1), Replicate(), Replicate()), {1: (0,)}),
        ],
        ids=repr,
    )
    def test_resolves(self, form, placements, order):
        # The mesh's axes are dp, cp, tp, in this order; P may name them in any other.
        found = form.resolve(("dp", "cp", "tp"), ndim=3)
        assert found == (placements, tuple(ShardOrderEntry(dim, axes) for dim, axes in order.items()))

    @pytest.mark.parametrize(
        ("form", "says"),
        [
            (P("zp"), "zp"),
            (P("dp", "dp"), "twice"),
            (P(("dp", "dp")), "twice"),
            (P("dp", partial={"dp": "sum"}), "twice"),
            (P("dp", None, None, None), "4 dims of a tensor that has 3"),
            (P(partial={"dp": "median"}), "median"),
        ],
        ids=repr,
    )
    def test_refuses_to_resolve(self, form, says):
        with pytest.raises(PlacementError, match=says):
            form.resolve(("dp", "cp", "tp"), ndim=3)
