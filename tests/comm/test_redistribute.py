"""Redistribution beyond the plain pairs: reductions, dtypes, interleaved cuts, orders, asynchrony, refusals."""

import gc
import itertools

import pytest
import torch
from hypothesis import given, settings

from shardwise import (
    DTensor,
    DTensorSpec,
    InterleavedShard,
    P,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    simulate,
)
from shardwise.errors import CommunicationError, InputError, LayoutError, MeshError, PlacementError
from shardwise.sharding.placement import REDUCE_OPS, AnyShard
from shardwise.sharding.spec import contiguous_meta
from shardwise.testing import assemble, make_dtensor
from shardwise.testing.strategies import allowed_ops, integer_values, redistributions
from shardwise.testing.values import same
from shardwise.world import replicate
from tests.worlds import Recorder, mesh_of

FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
DTYPES = [
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.complex64,
    torch.complex128,
]
SHAPE = (5, 4)


def value_of(dtype, shape=SHAPE):
    if dtype in FLOAT8:  # which has room for small numbers only
        return integer_values(shape, torch.float32, 0).div(6).round().to(dtype)
    return integer_values(shape, dtype, 0)


def check(mesh, value, source, target):
    y = make_dtensor(value, mesh, source, seed=3).redistribute(placements=target)
    assert same(assemble(y), value), (source, target)


@pytest.mark.parametrize("dtype", [*DTYPES, *FLOAT8], ids=str)
def test_dtypes_move(dtype):
    # Without Partial every dtype moves, whatever a backend thinks of it; sizes are even on one axis, not on the other.
    lists = list(itertools.product([Shard(0), Shard(1), Replicate()], repeat=2))
    with mesh_of(2, 3) as mesh:
        for shape in [SHAPE, (6, 6)]:
            for source, target in itertools.product(lists, repeat=2):
                check(mesh, value_of(dtype, shape), source, target)


@pytest.mark.parametrize(("dtype", "op"), [(dtype, op) for dtype in DTYPES for op in allowed_ops(dtype)], ids=str)
def test_every_dtype_and_reduction(dtype, op):
    one_axis = [[Shard(0)], [Shard(1)], [Replicate()], [Partial(op)]]
    two_axes = list(itertools.product([Shard(0), Shard(1), Replicate(), Partial(op)], repeat=2))
    for sizes, lists, step in [((3,), one_axis, 1), ((2, 2), two_axes, 5)]:
        with mesh_of(*sizes) as mesh:
            for shape in [SHAPE, (6, 4)]:
                for source, target in list(itertools.product(lists, repeat=2))[::step]:
                    check(mesh, value_of(dtype, shape), source, target)


@pytest.mark.parametrize(
    ("dtype", "op"),
    [(torch.float8_e4m3fn, op) for op in REDUCE_OPS] + [(torch.float8_e5m2, op) for op in ("max", "min", "product")],
    ids=str,
)
def test_float8_reductions(dtype, op):
    # float8 has no arithmetic in torch, so it is moved as bytes and reduced in float32; e4m3fn has no infinity to fill
    # in for absent ranks. One Partial axis only, and no sums in e5m2: the operands have no room.
    with mesh_of(2) as mesh:
        for source, target in itertools.product([Shard(0), Replicate(), Partial(op)], repeat=2):
            check(mesh, value_of(dtype), [source], [target])


@pytest.mark.parametrize("ops", list(itertools.product(REDUCE_OPS, repeat=2)), ids="-".join)
def test_nested_reductions(ops):
    # Both axes Partial, by the same op or two that may not commute, from and to everything else.
    with mesh_of(2, 3) as mesh:
        value = value_of(torch.float32)
        partial = [Partial(op) for op in ops]
        for other in itertools.product([Shard(0), Shard(1), Replicate(), Partial(ops[1])], repeat=2):
            check(mesh, value, partial, other)
            check(mesh, value, other, partial)
        check(mesh, value, partial, partial[::-1])


@pytest.mark.parametrize("op", ["max", "min"])
def test_infinities_and_nan(op):
    # The identities that fill in for other ranks must not hide or produce anything.
    value = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0])
    with mesh_of(3) as mesh:
        for source in ([Shard(0)], [Replicate()]):
            x = make_dtensor(value, mesh, source, seed=0).redistribute(placements=[Partial(op)])
            assert same(assemble(x), value)
            assert same(assemble(x.redistribute(placements=[Shard(0)])), value)


def test_empty_ranks_hold_identities():
    # 2 rows over 4 ranks: two ranks hold nothing, and must not disturb a max of negative numbers.
    with mesh_of(4) as mesh:
        for dtype in (torch.float32, torch.int32):
            value = torch.tensor([-3, -7]).to(dtype)
            for op in ("max", "min", "product", "sum"):
                check(mesh, value, [Shard(0)], [Partial(op)])


@pytest.mark.parametrize("sizes", [(2,), (3,), (2, 2), (2, 3), (2, 2, 2)], ids=str)
def test_interleaved(sizes):
    # Plain, interleaved by 2 and by 3, and replicated, on every axis; what the size does not allow is refused.
    choices = [Shard(0), Replicate(), InterleavedShard(0, 2), InterleavedShard(0, 3), Partial()]
    with mesh_of(*sizes) as mesh:
        value = value_of(torch.float32, (24, 2))
        made = []
        for placements in itertools.product(choices, repeat=len(sizes)):
            try:
                made.append((placements, make_dtensor(value, mesh, placements, seed=0)))
            except LayoutError:
                assert len(sizes) > 1
        pairs = list(itertools.product(made, repeat=2))
        for (_, x), (target, _) in pairs[:: max(1, len(pairs) // 250)]:
            y = x.redistribute(placements=target)
            assert y.placements == target
            assert torch.equal(assemble(y), value), (x.placements, target)


def test_interleaved_holds_a_piece_of_every_block():
    # A fused [q; k; v] weight cut by heads: each rank has its rows of q, of k and of v.
    with mesh_of(2) as mesh:
        x = distribute_tensor(torch.arange(12), mesh, [InterleavedShard(0, 3)])
        assert x.shards[0].tolist() == [0, 1, 4, 5, 8, 9]
        assert x.shards[1].tolist() == [2, 3, 6, 7, 10, 11]


FORMS = [
    P(("a", "b", "c")),
    P(("c", "b", "a")),
    P(("b", "a"), "c"),
    P("c", ("a", "b")),
    P(None, ("c", "a")),
    P(("b", "c"), partial={"a": "sum"}),
    P("b", partial={"c": "max"}),
    P(),
]


@pytest.mark.parametrize("shape", [(8, 8), (7, 5), (1, 3), (0, 2)], ids=str)
def test_orders(shape):
    with mesh_of(2, 2, 2) as mesh:
        value = value_of(torch.float32, shape)
        for source, target in itertools.product(FORMS, repeat=2):
            check(mesh, value, source, target)


def test_order_says_who_holds_what():
    with mesh_of(2, 2) as mesh:
        value = torch.arange(8)
        major_first = distribute_tensor(value, mesh, P(("a", "b")))
        minor_first = major_first.redistribute(placements=P(("b", "a")))
        # Ranks 0 to 3 sit at (0, 0), (0, 1), (1, 0), (1, 1).
        assert [shard.tolist() for shard in major_first.shards.values()] == [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert [shard.tolist() for shard in minor_first.shards.values()] == [[0, 1], [4, 5], [2, 3], [6, 7]]
        assert major_first.placements != minor_first.placements  # they rebuild the tensor without an order
        assert major_first.shard_order != minor_first.shard_order


@pytest.mark.parametrize("op", REDUCE_OPS)
def test_zero_dim(op):
    with mesh_of(2, 3) as mesh:
        value = torch.tensor(-7.0)
        choices = [Replicate(), Partial(op)]
        for source, target in itertools.product(itertools.product(choices, repeat=2), repeat=2):
            check(mesh, value, source, target)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.bool, torch.complex64], ids=str)
def test_zero_size(shape, dtype):
    lists = list(itertools.product([Shard(0), Shard(-1), Replicate(), Partial()], repeat=2))
    with mesh_of(2, 2) as mesh:
        value = torch.empty(shape, dtype=dtype)
        for source, target in list(itertools.product(lists, repeat=2))[::3]:
            check(mesh, value, source, target)


def test_negative_dims():
    with mesh_of(4) as mesh:
        x = make_dtensor(value_of(torch.float32), mesh, [Shard(0)], seed=0).redistribute(placements=[Shard(-1)])
        assert x.placements == (Shard(1),)


def test_memory_order_does_not_matter():
    # Local tensors that are not row-major, as from_local may be given.
    value = value_of(torch.float32, (4, 6))
    with mesh_of(2, 2) as mesh:
        for source in itertools.product([Shard(0), Shard(1), Replicate(), Partial()], repeat=2):
            local = make_dtensor(value.t().contiguous(), mesh, [_swapped(p) for p in source], seed=1).to_local().t()
            x = DTensor.from_local(local, mesh, source, run_check=True)
            for target in itertools.product([Shard(0), Shard(1), Replicate(), Partial()], repeat=2):
                assert torch.equal(assemble(x.redistribute(placements=target)), value), (source, target)


def _swapped(placement):
    return Shard(1 - placement.dim) if isinstance(placement, AnyShard) else placement


@settings(max_examples=400)
@given(redistributions())
def test_anything_to_anything(case):
    with simulate(case.ranks):
        mesh = init_device_mesh("cpu", case.mesh_shape, mesh_dim_names=case.axis_names)
        value = case.value()
        x = make_dtensor(value, mesh, case.source, seed=case.seed)
        assert same(assemble(x), value)
        assert same(assemble(x.redistribute(placements=case.target)), value)
        assert all(same(shard, value) for shard in x.full_tensor().shards)


PAIRS = [
    ([Shard(0)], [Replicate()]),
    ([Shard(0)], [Shard(1)]),
    ([Partial()], [Replicate()]),
    ([Partial()], [Shard(0)]),
    ([Partial()], [Partial("max")]),  # a local step follows the collective
    ([Replicate()], [Shard(0)]),  # nothing to wait for
    ([Shard(0)], [Shard(0)]),
]


class TestAsync:
    @pytest.mark.parametrize(("source", "target"), PAIRS, ids=str)
    @pytest.mark.parametrize("shape", [(8, 4), (5, 3)], ids=str)
    def test_waits_on_first_use(self, source, target, shape):
        value = value_of(torch.float32, shape)
        with mesh_of(4) as mesh:
            x = make_dtensor(value, mesh, source, seed=0)
            with Recorder() as recorder:
                y = x.redistribute(placements=target, async_op=True)
                communicates = bool(recorder.calls)
                # What is known without the data does not wait for it.
                assert (y.shape, y.dtype, y.placements) == (value.shape, value.dtype, tuple(target))
                assert "wait_tensor" not in recorder.names
                y.to_local()
                assert recorder.names.count("wait_tensor") == communicates
                y.to_local()
                assert recorder.names.count("wait_tensor") == communicates
            assert type(y) is DTensor
            assert torch.equal(assemble(y), value)

    @pytest.mark.parametrize("use", ["add", "redistribute", "full_tensor", "shards", "repr", "detach", "clone"])
    def test_any_use_waits(self, use):
        value = value_of(torch.float32, (8, 4))
        with mesh_of(4) as mesh:
            y = make_dtensor(value, mesh, [Partial()], seed=0).redistribute(placements=[Shard(0)], async_op=True)
            if use == "add":
                assert torch.equal(assemble(y + y), 2 * value)
            elif use == "redistribute":
                assert torch.equal(assemble(y.redistribute(placements=[Shard(1)])), value)
            elif use == "full_tensor":
                assert torch.equal(y.full_tensor().shards[0], value)
            elif use == "shards":
                assert torch.equal(y.shards[1], value[2:4])
            elif use == "repr":
                assert "f32[8@a, 4]" in repr(y)
            else:
                assert torch.equal(assemble(getattr(y, use)()), value)

    def test_dropped_unused_is_waited_for(self):
        # A collective that nobody waits for would make the backend complain at exit.
        gc.collect()  # what earlier tests dropped is none of this one's
        with mesh_of(4) as mesh, Recorder() as recorder:
            x = make_dtensor(value_of(torch.float32), mesh, [Partial()], seed=0)
            y = x.redistribute(placements=[Replicate()], async_op=True)
            assert recorder.names == ["all_reduce"]
            del y
            gc.collect()
            assert recorder.names == ["all_reduce", "wait_tensor"]

    def test_chained(self):
        value = value_of(torch.float32, (8, 4))
        with mesh_of(2, 2) as mesh:
            x = make_dtensor(value, mesh, [Partial(), Shard(0)], seed=0)
            for target in ([Shard(1), Shard(0)], [Replicate(), Shard(1)], [Shard(0), Shard(0)]):
                x = x.redistribute(placements=target, async_op=True)
            assert torch.equal(assemble(x), value)


def unchecked(local, mesh, placements):
    """A tensor that from_local would refuse."""
    spec = DTensorSpec(mesh, placements, contiguous_meta(local.shape, local.dtype))
    return DTensor(replicate(local, spec.mesh_info.world_size), spec)


class TestRefused:
    @pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool], ids=str)
    def test_average_of_integers(self, dtype):
        with mesh_of(2) as mesh:
            x = unchecked(torch.ones(4).to(dtype), mesh, [Partial("avg")])
            with pytest.raises(CommunicationError, match="average"):
                x.redistribute(placements=[Replicate()])
            y = distribute_tensor(torch.ones(4).to(dtype), mesh, [Replicate()])
            with pytest.raises(CommunicationError, match="average"):
                y.redistribute(placements=[Partial("avg")])

    @pytest.mark.parametrize("op", ["max", "min"])
    def test_order_of_complex_numbers(self, op):
        with mesh_of(2) as mesh:
            x = unchecked(torch.ones(4, dtype=torch.complex64), mesh, [Partial(op)])
            with pytest.raises(CommunicationError, match="complex"):
                x.redistribute(placements=[Shard(0)])

    @pytest.mark.parametrize("sizes", [(2, 2), (4, 1)], ids=str)
    def test_another_mesh(self, sizes):
        with simulate(4):
            x = make_dtensor(value_of(torch.float32), init_device_mesh("cpu", (4,)), [Shard(0)], seed=0)
            other = init_device_mesh("cpu", sizes)
            assert torch.equal(assemble(x.redistribute(other, [Replicate()] * 2)), assemble(x))

    def test_a_mesh_of_other_ranks(self):
        with simulate(4):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
            x = make_dtensor(value_of(torch.float32), mesh["a"], [Shard(0)], seed=0)
            with pytest.raises(MeshError, match="each instance has a tensor of its own"):
                x.redistribute(mesh["b"], [Replicate()])

    def test_an_equal_mesh_is_the_same_mesh(self):
        with simulate(4):
            one, other = (init_device_mesh("cpu", (4,), mesh_dim_names=("a",)) for _ in range(2))
            value = value_of(torch.float32)
            x = make_dtensor(value, one, [Shard(0)], seed=0)
            assert torch.equal(assemble(x.redistribute(other, [Replicate()])), value)

    def test_no_placements(self):
        with mesh_of(2) as mesh:
            x = make_dtensor(value_of(torch.float32), mesh, [Shard(0)], seed=0)
            with pytest.raises(InputError, match="no placements"):
                x.redistribute()
            with pytest.raises(InputError, match="no placements"):
                x.redistribute(mesh)

    @pytest.mark.parametrize("placements", [[Shard(2)], [Shard(0)] * 2, []], ids=str)
    def test_placements_that_do_not_fit(self, placements):
        with mesh_of(2) as mesh, Recorder() as recorder:
            x = make_dtensor(value_of(torch.float32), mesh, [Shard(0)], seed=0)
            with pytest.raises(PlacementError):
                x.redistribute(placements=placements)
            assert not recorder.calls

    def test_nothing_was_sent_before_a_refusal(self):
        # The sum over b is possible, the average over a is not: neither is begun.
        with mesh_of(2, 2) as mesh:
            local = torch.ones(4, dtype=torch.int64)
            x = unchecked(local, mesh, [Partial("avg"), Partial()])
            with Recorder() as recorder, pytest.raises(CommunicationError):
                x.redistribute(placements=[Replicate(), Replicate()])
            assert not recorder.calls
