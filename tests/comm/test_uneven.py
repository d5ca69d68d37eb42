"""Uneven shards: gathered and reduced by a native collective on padded pieces, or by an exchange of exact ones.

Both ways are forced by a cost model, compared with one device, and the choice of the default model is asserted.
"""

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise import (
    CostModel,
    InterleavedShard,
    P,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    plan,
    simulate,
    using_cost_model,
)
from shardwise.comm.cost import Links, Rates
from shardwise.comm.plan import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, EXCHANGE, REDUCE_SCATTER, received_exactly
from shardwise.comm.planner import make_plan
from shardwise.sharding.from_placements import default_order, from_placements
from shardwise.testing import assemble, make_dtensor
from shardwise.testing.values import same
from tests.worlds import Recorder, fake_group, mesh_of

PADDED = CostModel(p2p_latency=10.0)
EXACT = CostModel(latency=10.0, p2p_latency=1e-6)
MODELS = {"padded": PADDED, "exact": EXACT}
NATIVE = {"all_gather_into_tensor", "reduce_scatter_tensor"}


@pytest.fixture(params=MODELS, ids=str)
def choice(request):
    with using_cost_model(MODELS[request.param]):
        yield request.param


def moved(x, target, choice, uneven):
    """The redistributed tensor; only the collectives of this choice may have carried uneven pieces."""
    with Recorder() as recorder:
        y = x.redistribute(placements=target)
    called = set(recorder.names) - {"wait_tensor"}
    if choice == "padded":
        assert "all_to_all_single" not in called, (x, target)
    elif uneven:
        assert not called & NATIVE, (x, target)
    return y


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("dim", [0, 1])
def test_every_small_size_on_one_axis(choice, ranks, dim):
    shard = [Shard(dim)]
    moves = [(shard, [Replicate()]), *([[Partial(op)], shard] for op in ("sum", "avg", "max"))]
    with mesh_of(ranks) as mesh:
        for size in range(10):
            value = torch.randint(-50, 50, (size, 3) if dim == 0 else (3, size)).float()
            for source, target in [*moves, ([Partial()], [Replicate()])]:
                x = make_dtensor(value, mesh, source, seed=size)
                y = moved(x, target, choice, size % ranks)
                assert torch.equal(assemble(y), value), (size, source, target)
                assert all(shard.is_contiguous() for shard in y.shards.values())


@pytest.mark.parametrize("sizes", [(2, 2), (2, 3)], ids=str)
def test_every_small_size_on_two_axes(choice, sizes):
    # One axis or both on a dim, in both orders, and interleaved blocks, from and to replicated and summed tensors.
    sources = [P(("a", "b")), P(("b", "a")), P("a"), P("b"), P("a", "b"), P(None, ("a", "b")), P(None, "b")]
    with mesh_of(*sizes) as mesh:
        for size in range(10):
            value = torch.randint(-50, 50, (size, 3)).float()
            everywhere = make_dtensor(value, mesh, P(partial={"a": "sum", "b": "sum"}), seed=size)
            for placements in sources:
                x = everywhere.redistribute(placements=placements)
                assert torch.equal(assemble(x), value), (size, placements)
                assert torch.equal(assemble(x.redistribute(placements=P())), value), (size, placements)
            x = make_dtensor(value, mesh, P(("a", "b")), seed=0)
            for target in (P("a"), P(None, "b"), P("a", partial={"b": "max"})):
                assert torch.equal(assemble(x.redistribute(placements=target)), value), (size, target)


def test_interleaved_blocks(choice):
    # 6 blocks of 5 or 7 rows over 2, 3 or 4 ranks: several boxes on each rank, all of them uneven.
    for ranks, blocks, rows in itertools.product((2, 3, 4), (2, 3), (5, 7)):
        value = torch.randn(blocks * rows, 6)
        with mesh_of(ranks) as mesh:
            for placement in (InterleavedShard(0, blocks), InterleavedShard(1, 2)):
                x = make_dtensor(value, mesh, [placement], seed=0)
                assert torch.equal(assemble(moved(x, [Replicate()], choice, True)), value)
                summed = make_dtensor(value.round(), mesh, [Partial()], seed=0)
                assert torch.equal(assemble(summed.redistribute(placements=[placement])), value.round())


DTYPES = [torch.float64, torch.float16, torch.bool, torch.int16, torch.uint8, torch.complex64, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(choice, dtype):
    # Some travel as bytes; some are reduced by the ranks themselves, whichever way they travel.
    op = "max" if dtype in (torch.bool, torch.float8_e5m2) else "sum"
    with mesh_of(4) as mesh:
        for size, dim in itertools.product((1, 3, 5, 7), (0, 1)):
            value = torch.randint(0, 3, (size, 3) if dim == 0 else (3, size)).to(dtype)
            gathered = moved(make_dtensor(value, mesh, [Shard(dim)], seed=0), [Replicate()], choice, True)
            assert same(assemble(gathered), value)
            x = make_dtensor(value, mesh, [Partial(op)], seed=0)
            assert same(assemble(x.redistribute(placements=[Shard(dim)])), value)


@pytest.mark.parametrize("dim", [0, 1])
def test_backward(choice, dim):
    # The gradient takes the same ways: a slice becomes a gather, a sum a replicated gradient, a gather a slice.
    moves = itertools.product([[Shard(dim)], [Partial()], [Replicate()]], repeat=2)
    with mesh_of(4) as mesh:
        for size, (source, target) in itertools.product((1, 3, 5, 6, 9), list(moves)):
            value = torch.randn(size, size)
            weight = torch.randn(size, size)
            x = distribute_tensor(value, mesh, source).requires_grad_()
            y = x.redistribute(placements=target)
            (y.redistribute(placements=[Replicate()]) * distribute_tensor(weight, mesh, [Replicate()])).sum().backward()
            torch.testing.assert_close(assemble(x.grad), weight)


def test_asynchronously(choice):
    value = torch.randn(7, 5)
    with mesh_of(4) as mesh:
        for source, target in itertools.permutations([[Shard(0)], [Shard(1)], [Partial()], [Replicate()]], 2):
            x = distribute_tensor(value, mesh, source)
            y = x.redistribute(placements=target, async_op=True)
            for shard in x.shards.values():
                shard.fill_(-1.0)  # the source may be written while the collective is under way
            torch.testing.assert_close(assemble(y), value)


def test_neither_pads_nor_exchanges_where_each_group_is_even(choice):
    # 7 rows over a are uneven, but all ranks of a group over b hold halves of one size.
    value = torch.randn(7, 4)
    with mesh_of(2, 2) as mesh:
        x = make_dtensor(value, mesh, P("a", "b"), seed=0)
        with using_cost_model(CostModel()), Recorder() as recorder:
            y = x.redistribute(placements=P("a"))
        assert recorder.names == ["all_gather_into_tensor", "wait_tensor"]
        assert torch.equal(assemble(y), value)
        assert "padded" not in str(plan(x.spec, y.spec))


# ---- choices of the default model ------------------------------------------------------------------------------------

VOCABULARY = 50_257


def only_step(mesh, shape, source, target):
    x = from_placements(mesh, shape, source, default_order(source))
    y = from_placements(mesh, shape, target, default_order(target))
    links = Links.uniform(500e-6, 20e-6, 1e-10, (2e9,) * len(mesh))
    (step,) = make_plan(x, y, 4, links).steps
    return step


@pytest.mark.parametrize("dim", [0, 1])
def test_a_vocabulary_keeps_native_collectives(dim):
    shape = (VOCABULARY, 768) if dim == 0 else (768, VOCABULARY)
    row, padded = 768 * 4, math.ceil(VOCABULARY / 8)
    for source, target, kind in [
        ([Shard(dim)], [Replicate()], ALL_GATHER),
        ([Partial()], [Shard(dim)], REDUCE_SCATTER),
        ([Partial()], [Replicate()], ALL_REDUCE),
        ([Shard(dim)], [Shard(1 - dim)], ALL_TO_ALL),
    ]:
        step = only_step((8,), shape, source, target)
        assert step.kind == kind
        assert step.is_padded == (kind in (ALL_GATHER, REDUCE_SCATTER))
        if step.is_padded:
            assert step.received == received_exactly(step, 4) == 7 * padded * row
            assert step.received / (VOCABULARY * row * 7 / 8) < 1.001


def test_a_few_rows_over_many_ranks_are_exchanged():
    # Padded, 3 rows over 8 ranks would be 8 rows.
    step = only_step((8,), (3, 4096), [Shard(0)], [Replicate()])
    assert step.kind == EXCHANGE
    assert step.received == received_exactly(step, 4) == 3 * 4096 * 4


def test_point_to_point_traffic_that_is_slower_prefers_pads():
    layouts = [from_placements((8,), (10, 4096), [p], default_order([p])) for p in (Shard(0), Replicate())]
    ring = Rates((20e-6,), 0.5e-6, (25e9,))
    kinds = []
    for bandwidth in (25e9, 2.5e9):
        (step,) = make_plan(*layouts, 4, Links(ring, ring._replace(bandwidth=(bandwidth,)), 1e-12)).steps
        kinds.append((step.kind, step.received // (4096 * 4)))
    assert kinds == [(EXCHANGE, 10), (ALL_GATHER, 14)]


def test_the_printed_plan_says_which():
    with mesh_of(8, names=("tp",)) as mesh:
        x = distribute_tensor(torch.ones(17, 64), mesh, P("tp"))
        replicated, summed = x.spec.with_placements(P()), x.spec.with_placements(P(partial={"tp": "sum"}))
        with using_cost_model(PADDED):
            assert str(plan(x.spec, replicated)).splitlines()[1:] == [
                "  1. all-gather           over tp           5.25 KiB   f32[17, 64]   padded"
            ]
            assert str(plan(summed, x.spec)).splitlines()[1:] == [
                "  1. reduce-scatter (sum) over tp           5.25 KiB   f32[17@tp, 64]   padded"
            ]
        with using_cost_model(EXACT):
            assert "  1. exchange             over tp           4.25 KiB   f32[17, 64]" in str(plan(x.spec, replicated))
            assert "  1. exchange (sum)       over tp" in str(plan(summed, x.spec))


def test_a_gathered_first_dim_is_a_view_of_what_was_received():
    with fake_group(4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        x = distribute_tensor(torch.ones(4001, 8), mesh, [Shard(0)], src_data_rank=None)
        y = x.redistribute(placements=[Replicate()]).to_local()
        assert y.shape == (4001, 8)
        assert y.is_contiguous()
        assert y.untyped_storage().nbytes() == 4 * 1001 * 8 * 4
        other = distribute_tensor(torch.ones(8, 4001), mesh, [Shard(1)], src_data_rank=None)
        z = other.redistribute(placements=[Replicate()]).to_local()
        assert z.is_contiguous()
        assert z.untyped_storage().nbytes() == 4001 * 8 * 4


class Copies(TorchDispatchMode):
    """The local copies that run inside it, by name."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("copy_", "clone", "cat", "_to_copy", "stack"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rank", [0, 3])
def test_copies_around_the_collective(rank):
    # Gathered along dim 0, only a short shard is copied, to pad it; along dim 1, the pieces are put together.
    dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        full = torch.ones(401, 401)
        padding = ["copy_"] if rank == 3 else []
        for source, target, expected in [
            ([Shard(0)], [Replicate()], padding),
            ([Shard(1)], [Replicate()], [*padding, "cat"]),
            ([Partial()], [Shard(0)], ["copy_"]),
            ([Partial()], [Shard(1)], ["copy_"] * 4),  # one for each piece
        ]:
            x = distribute_tensor(full, mesh, source, src_data_rank=None)
            x.redistribute(placements=target)
            with Copies() as copies:
                x.redistribute(placements=target)
            assert copies.names == expected, (source, target)
    finally:
        dist.destroy_process_group()


# ---- figures of the model ------------------------------------------------------------------------------------------


def test_axes_that_cross_nodes_are_slower_point_to_point():
    with simulate(8):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        info = distribute_tensor(torch.ones(4), mesh, [Replicate(), Replicate()])._spec.mesh_info
    links = CostModel(node_size=4, network_p2p=0.25, latency={"dp": 1e-3}).links(info)
    assert links.ring.bandwidth == (1e9, 2e9)
    assert links.p2p.bandwidth == (0.25e9, 2e9)
    assert links.ring.latency == links.p2p.latency == (1e-3, 500e-6)
    links = CostModel(bandwidth={"dp": 8e9}, p2p_bandwidth={"tp": 1e8}, p2p_latency=1e-6, p2p_peer_latency=0.0).links(
        info
    )
    assert links.ring.bandwidth == (8e9, 2e9)
    assert links.p2p == Rates((1e-6, 1e-6), 0.0, (8e9, 1e8))
