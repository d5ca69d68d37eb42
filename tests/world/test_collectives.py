import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from shardwise.comm.groups import adopt
from shardwise.errors import WorldError
from shardwise.world import RankTensor, groups_of, map_ranks, rank_int, register_group, simulate

ops = torch.ops._c10d_functional
PARTITIONS = {
    "world": [(0, 1, 2, 3, 4, 5)],
    "rows": [(0, 1, 2), (3, 4, 5)],
    "columns": [(0, 3), (1, 4), (2, 5)],
    "backwards": [(2, 1, 0), (5, 4, 3)],
    "some": [(1, 3), (0, 4)],
}
IN_GROUP = {"sum": torch.sum, "avg": torch.mean, "product": torch.prod, "max": torch.amax, "min": torch.amin}


@pytest.fixture(autouse=True)
def world():
    with simulate(6):
        for name, groups in PARTITIONS.items():
            register_group(name, groups)
        yield


def make(*shape: int, dtype: torch.dtype = torch.float64) -> RankTensor:
    return map_ranks(lambda rank: torch.randn(shape).mul(10).to(dtype))


def apart(*tensors: RankTensor) -> None:
    pointers = [s.untyped_storage().data_ptr() for t in tensors for s in t.shards if s.numel()]
    assert len(set(pointers)) == len(pointers)


def group_of(name: str, rank: int) -> tuple[int, ...] | None:
    return next((group for group in PARTITIONS[name] if rank in group), None)


@pytest.mark.parametrize("name", list(PARTITIONS))
@pytest.mark.parametrize("op", [*IN_GROUP, "SUM"])
def test_all_reduce(name: str, op: str) -> None:
    x = make(3, 2)
    y = ops.wait_tensor(ops.all_reduce(x, op, name))
    apart(x, y)
    many = ops.all_reduce_coalesced([x, x * 2], op, name)
    apart(*many)
    for rank in range(6):
        group = group_of(name, rank)
        want = x.shards[rank]
        if group is not None:
            want = IN_GROUP[op.lower()](torch.stack([x.shards[r] for r in group]), 0)
        torch.testing.assert_close(y.shards[rank], want)
        torch.testing.assert_close(many[0].shards[rank], want)
    before, pointers = y.shards, [s.data_ptr() for s in x.shards]
    assert ops.all_reduce_(x, op, name) is x
    assert [s.data_ptr() for s in x.shards] == pointers
    assert all(torch.equal(a, b) for a, b in zip(x.shards, before, strict=True))


@pytest.mark.parametrize("op", ["band", "bor", "bxor", "sum", "max"])
def test_all_reduce_of_integers_and_booleans(op: str) -> None:
    bits = {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}
    by_op = {**bits, "sum": torch.add, "max": torch.maximum}
    x = make(4, dtype=torch.int32)
    y = ops.all_reduce(x, op, "columns")
    assert torch.equal(y.shards[4], by_op[op](x.shards[1], x.shards[4]))
    if op in ("sum", "max"):
        flags = map_ranks(lambda rank: torch.tensor([rank == 1, False]))
        assert ops.all_reduce(flags, op, "rows").shards[0].tolist() == [True, False]


def test_sums_are_made_in_the_order_of_the_group() -> None:
    big = [256.0, 1.0, 1.0, 1.0, 1.0, 256.0]
    x = RankTensor([torch.tensor(v, dtype=torch.bfloat16) for v in big])
    y = ops.all_reduce(x, "sum", "backwards")
    assert y.shards[0].item() == 258  # (1 + 1) + 256
    assert ops.all_reduce(x, "sum", "rows").shards[0].item() == 256  # (256 + 1) + 1, each rounded


@pytest.mark.parametrize("name", list(PARTITIONS))
def test_gather_scatter_broadcast(name: str) -> None:
    x = make(6, 2)
    n = len(PARTITIONS[name][0])
    gathered = ops.all_gather_into_tensor(x, n, name)
    scattered = ops.reduce_scatter_tensor(x, "sum", n, name)
    sent = ops.broadcast(x, n - 1, name)
    apart(x, gathered, scattered, sent)
    (many,) = ops.all_gather_into_tensor_coalesced([x], n, name)
    (few,) = ops.reduce_scatter_tensor_coalesced([x], "sum", n, name)
    for rank in range(6):
        group = group_of(name, rank)
        if group is None:
            assert gathered.shards[rank].shape == scattered.shards[rank].shape == (0, 2)
            assert torch.equal(sent.shards[rank], x.shards[rank])
            continue
        pieces = [x.shards[r] for r in group]
        assert torch.equal(gathered.shards[rank], torch.cat(pieces))
        assert torch.equal(many.shards[rank], torch.cat(pieces))
        want = torch.stack(pieces).sum(0).chunk(n)[group.index(rank)]
        torch.testing.assert_close(scattered.shards[rank], want)
        torch.testing.assert_close(few.shards[rank], want)
        assert torch.equal(sent.shards[rank], pieces[-1])
    assert ops.broadcast_(x, n - 1, name) is x
    assert all(torch.equal(a, b) for a, b in zip(x.shards, sent.shards, strict=True))


@pytest.mark.parametrize("name", list(PARTITIONS))
@pytest.mark.parametrize("uneven", [False, True])
def test_all_to_all(name: str, uneven: bool) -> None:
    n = len(PARTITIONS[name][0])
    # send[a][b]: rows from rank a to place b of its group; some are 0
    send = [[(a + 2 * b) % 3 if uneven else 2 for b in range(n)] for a in range(6)]
    x = map_ranks(lambda rank: torch.randn(sum(send[rank]), 2))
    receive = []
    for rank in range(6):
        group = group_of(name, rank) or (rank,) * n
        receive.append([send[peer][group.index(rank)] for peer in group])
    ins = [rank_int([send[rank][b] for rank in range(6)]) for b in range(n)]
    outs = [rank_int([receive[rank][b] for rank in range(6)]) for b in range(n)]
    results = [ops.all_to_all_single(x, outs, ins, name)]
    if not uneven:
        results.append(ops.all_to_all_single(x, [], [], name))
    for y in results:
        apart(x, y)
        for rank in range(6):
            group = group_of(name, rank)
            if group is None:
                assert y.shards[rank].shape == (0, 2)
                continue
            want = torch.cat([x.shards[peer].split(send[peer])[group.index(rank)] for peer in group])
            assert torch.equal(y.shards[rank], want)
    if uneven and name == "world":
        with pytest.raises(WorldError, match="which send"):
            ops.all_to_all_single(x, [1] * n, ins, name)
        with pytest.raises(WorldError, match="add up"):
            ops.all_to_all_single(x, outs, [50] * n, name)


def test_collectives_with_gradients() -> None:
    auto = torch.ops._c10d_functional_autograd
    x = make(6, 2).requires_grad_()
    y = ops.wait_tensor(auto.all_gather_into_tensor(x, 3, "rows"))
    weights = make(18, 2)
    (y * weights).sum().backward()
    total = [torch.stack([weights.shards[r] for r in group]).sum(0) for group in PARTITIONS["rows"]]
    for rank in range(6):
        want = total[rank // 3].chunk(3)[rank % 3]
        torch.testing.assert_close(x.grad.shards[rank], want)


def test_what_makes_no_sense_is_refused() -> None:
    x = make(5, 2)
    with pytest.raises(WorldError, match="no mesh of the running simulated world"):
        ops.all_reduce(x, "sum", "stranger")
    with pytest.raises(WorldError, match="group_size=2"):
        ops.all_gather_into_tensor(x, 2, "rows")
    with pytest.raises(WorldError, match="5 rows over 3"):
        ops.reduce_scatter_tensor(x, "sum", 3, "rows")
    with pytest.raises(WorldError, match="5 rows over 3"):
        ops.all_to_all_single(x, [], [], "rows")
    with pytest.raises(WorldError, match="reduce op"):
        ops.all_reduce(x, "median", "rows")
    with pytest.raises(WorldError, match="average"):
        ops.all_reduce(x.long(), "avg", "rows")
    uneven = map_ranks(lambda rank: torch.ones(rank))
    for call in (
        lambda: ops.all_reduce(uneven, "sum", "rows"),
        lambda: ops.all_gather_into_tensor(uneven, 3, "rows"),
        lambda: ops.broadcast(uneven, 0, "rows"),
    ):
        with pytest.raises(WorldError, match=r"rank 1 passes \(1,\), rank 0 \(0,\)"):
            call()
    with pytest.raises(WorldError, match="a collective of a tensor of 2 ranks in group"):
        ops.all_reduce(RankTensor([torch.ones(1)] * 2), "sum", "rows")
    with pytest.raises(WorldError, match="one of the parallel groups"):
        register_group("twice", [(0, 1), (1, 2)])
    with pytest.raises(WorldError, match="one of the parallel groups"):
        register_group("beyond", [(0, 6)])


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # renamed in newer versions of PyTorch
def test_process_group_functions() -> None:
    x = make(2)
    want = torch.stack(x.shards).sum(0)
    y = x.clone()
    dist.all_reduce(y)
    torch.testing.assert_close(y.shards[5], want)
    y = x.clone()
    work = dist.all_reduce(y, op=dist.ReduceOp.MAX, async_op=True)
    work.wait()
    assert torch.equal(y.shards[2], torch.stack(x.shards).amax(0))
    y = x.clone()
    dist.broadcast(y, 4)
    assert all(torch.equal(s, x.shards[4]) for s in y.shards)
    full = x.new_empty(12)
    dist.all_gather_into_tensor(full, x)
    assert torch.equal(full.shards[3], torch.cat(x.shards))
    share = x.new_empty(2)
    dist.reduce_scatter_tensor(share, full)
    assert torch.equal(share.shards[1], x.shards[1] * 6)
    dist.barrier()
    for refused in (
        lambda: dist.reduce(x, 0),
        lambda: dist.send(x, 1),
        lambda: dist.gather(x, [x.clone() for _ in range(6)]),
    ):
        with pytest.raises(WorldError, match="not available in a simulated world"):
            refused()


def test_the_world_group_is_known_by_name_and_as_an_object() -> None:
    name = dist.group.WORLD.group_name
    assert groups_of(name) == ((0, 1, 2, 3, 4, 5),)
    x = make(2)
    y = ops.all_reduce(x, "sum", name)
    torch.testing.assert_close(y.shards[0], torch.stack(x.shards).sum(0))


# ---- the functions of torch.distributed with lists of tensors --------------------------------------------------------


@pytest.fixture
def rows():
    """The process groups of a mesh of 2 x 3 ranks, and their ranks."""
    mesh = dist.init_device_mesh("cpu", (2, 3), mesh_dim_names=("outer", "rows"))
    map_ranks(lambda rank: torch.zeros(()))
    adopt(mesh)
    return mesh.get_group("rows"), PARTITIONS["rows"]


def test_all_gather(rows):
    group, parallel = rows
    x = make(2, 3)
    out = [torch.empty_like(x) for _ in range(3)]
    dist.all_gather(out, x, group=group)
    for ranks in parallel:
        for rank in ranks:
            for place, peer in enumerate(ranks):
                assert torch.equal(out[place].shards[rank], x.shards[peer])
    apart(x, *out)


def test_reduce_scatter(rows):
    group, parallel = rows
    xs = [make(2) for _ in range(3)]
    out = torch.empty_like(xs[0])
    dist.reduce_scatter(out, xs, group=group)
    for ranks in parallel:
        for place, rank in enumerate(ranks):
            torch.testing.assert_close(out.shards[rank], sum(xs[place].shards[peer] for peer in ranks))


def test_all_to_all_of_lists(rows):
    group, parallel = rows
    xs = [make(2) for _ in range(3)]
    outs = [torch.empty_like(xs[0]) for _ in range(3)]
    dist.all_to_all(outs, xs, group=group)
    single = torch.empty(6, dtype=torch.float64)
    single = map_ranks(lambda rank: single.clone())
    dist.all_to_all_single(single, torch.cat(xs), group=group)
    for ranks in parallel:
        for place, rank in enumerate(ranks):
            for peer_place, peer in enumerate(ranks):
                assert torch.equal(outs[peer_place].shards[rank], xs[place].shards[peer])
                assert torch.equal(single.shards[rank].view(3, 2)[peer_place], xs[place].shards[peer])


def test_functional_collectives_by_their_public_functions(rows):
    group, parallel = rows
    x = make(3, 2).requires_grad_()
    total = functional.all_reduce(x, "sum", group)
    for ranks in parallel:
        for rank in ranks:
            torch.testing.assert_close(total.detach().shards[rank], sum(x.detach().shards[peer] for peer in ranks))


def test_a_barrier_waits_for_nothing():
    dist.barrier()
