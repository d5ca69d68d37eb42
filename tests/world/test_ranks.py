import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwise.errors import WorldError
from shardwise.world import RankTensor, common, map_ranks, rank_int, replicate, simulate, values_of

N = 3


def even(*shape: int) -> RankTensor:
    return RankTensor([torch.randn(shape) for _ in range(N)])


def uneven(*tail: int, rows: tuple[int, ...] = (3, 2, 1)) -> RankTensor:
    return RankTensor([torch.randn(n, *tail) for n in rows])


def check(fn, *tensors) -> None:
    """`fn` of RankTensors is, on every rank, `fn` of that rank's shards."""
    got = fn(*tensors)
    got = got if isinstance(got, (tuple, list)) else [got]
    for rank in range(N):
        local = [t.shards[rank] if isinstance(t, RankTensor) else t for t in tensors]
        want = fn(*local)
        want = want if isinstance(want, (tuple, list)) else [want]
        assert len(got) == len(want)
        for g, w in zip(got, want, strict=True):
            assert isinstance(g, RankTensor)
            torch.testing.assert_close(g.shards[rank], w, rtol=0, atol=0, equal_nan=True)
            assert [s if (v := values_of(s)) is None else v[rank] for s in g.shape] == list(w.shape)
            for dim, stride in enumerate(g.stride()):
                if w.shape[dim] > 1:
                    assert g.shards[rank].stride(dim) == ((v := values_of(stride)) or [stride] * N)[rank]
            assert (g.dtype, g.device) == (w.dtype, w.device)


@pytest.mark.parametrize("make", [even, uneven])
@pytest.mark.parametrize(
    "code",
    [
        "x + 1",
        "2 - x",
        "x * x",
        "x.sum(0, keepdim=True)",
        "x.sum(1, dtype=torch.float64)",
        "x.max(1)",
        "x.t()",
        "x.t().contiguous()",
        "x[:, 1:]",
        "x.split(2, dim=1)",
        "x.unbind(1)",
        "x.view(-1)",
        "x.reshape(-1, 2)",
        "x.view(x.shape[0], 2, 2)",
        "x.flatten()",
        "x.unsqueeze(0).expand(2, -1, -1)",
        "torch.cat([x, x], 0)",
        "torch.cat([x, torch.ones(2, 4)], 0)",
        "torch.stack([x, x])",
        "F.softmax(x, -1)",
        "F.layer_norm(x, (4,))",
        "x @ torch.ones(4, 2)",
        'torch.einsum("ij,kj->ik", x, torch.ones(3, 4))',
        "x.to(torch.float64)",
        "x > 0",
        "torch.where(x > 0, x, torch.zeros(()))",
        "x[x > 0]",
        "x.nonzero()",
        "x.sort(1)",
        "x.new_zeros(x.shape)",
        "x.new_ones(x.shape)",
        "torch.zeros_like(x)",
        "torch.full_like(x, 3.0)",
        "x.var(1)",
        "x.narrow(1, 1, 2)",
        "torch.complex(x, x).abs()",
        "x.index_select(1, torch.tensor([1, 0]))",
        "F.pad(x, (1, 1))",
        "F.linear(x[:, None].expand(-1, 3, -1).contiguous(), torch.ones(2, 4), torch.ones(2))",
    ],
)
def test_ops_are_mapped(code, make) -> None:
    x = even(2, 4) if make is even else uneven(4)
    check(lambda x: eval(code, {"torch": torch, "F": F, "x": x}), x)


def test_an_empty_shard_is_a_shard_like_others() -> None:
    x = uneven(4, rows=(3, 2, 0))
    check(lambda x: x + 1, x)
    check(lambda x: x.sum(), x)
    check(lambda x: torch.cat([x, x]), x)
    check(lambda x: x @ torch.ones(4, 2), x)
    check(lambda x: x.view(-1), x)
    assert values_of(x.numel()) == (12, 8, 0)


def test_strides_that_differ() -> None:
    x = RankTensor([torch.randn(3, 2 + rank % 2) for rank in range(N)])
    columns = x[:, :2]
    assert values_of(columns.stride(0)) == (2, 3, 2)
    assert not columns.is_contiguous()
    for fn in (
        lambda x: x.contiguous(),
        lambda x: x.reshape(-1),
        lambda x: x.clone(),
        lambda x: x.t() + 1,
        lambda x: x @ x[:2],
        lambda x: x.permute(1, 0).contiguous().view(-1),
        lambda x: torch.empty_like(x).zero_(),
    ):
        check(fn, columns)
    assert columns.contiguous().is_contiguous()
    leaf = RankTensor(x.shards, requires_grad=True)
    leaf[:, :2].contiguous().view(-1).pow(2).sum().backward()
    for g, s in zip(leaf.grad.shards, x.shards, strict=True):
        assert torch.equal(g[:, :2], 2 * s[:, :2])


def test_plain_tensors_are_shared_by_all_ranks() -> None:
    check(lambda x, y: x * y, even(2), torch.tensor([1.0, 2.0]))
    check(lambda y, x: y * x, torch.tensor([1.0, 2.0]), even(2))


def test_in_place_keeps_the_object_and_the_memory() -> None:
    x = even(2, 2)
    shards, pointers, before = x.shards, [s.data_ptr() for s in x.shards], [s.clone() for s in x.shards]
    assert x.add_(1) is x
    assert x.mul_(even(2, 2).fill_(2)) is x
    assert all(a is b for a, b in zip(x.shards, shards, strict=True))
    assert [s.data_ptr() for s in x.shards] == pointers
    for s, b in zip(x.shards, before, strict=True):
        assert torch.equal(s, (b + 1) * 2)


def test_views_share_memory() -> None:
    x = uneven(4)
    x.view(-1)[0] = 7
    x[:, 1:].zero_()
    x.detach()[0, 0] += 1
    for s in x.shards:
        assert s[0, 0] == 8
        assert (s[:, 1:] == 0).all()


def test_view_and_write_are_seen_by_autograd() -> None:
    leaf = uneven(4).requires_grad_()
    x = leaf * 1
    x[:, :2].mul_(3)
    x.sum().backward()
    for g in leaf.grad.shards:
        assert (g[:, :2] == 3).all()
        assert (g[:, 2:] == 1).all()


def test_out() -> None:
    a, b = even(2, 3), even(2, 3)
    out = even(2, 3)
    pointers = [s.data_ptr() for s in out.shards]
    assert torch.add(a, b, out=out) is out
    assert [s.data_ptr() for s in out.shards] == pointers
    assert torch.equal(out.shards[1], a.shards[1] + b.shards[1])
    grown = RankTensor([torch.empty(0) for _ in range(N)])
    torch.add(a, b, out=grown)
    assert grown.shape == (2, 3)
    values, indices = even(2), RankTensor([torch.zeros(2, dtype=torch.long) for _ in range(N)])
    torch.max(a, 1, out=(values, indices))
    assert torch.equal(indices.shards[2], a.shards[2].argmax(1))


def test_sizes_changed_in_place() -> None:
    x = even(2, 3)
    twin = x.detach()
    x.t_()
    assert x.shape == (3, 2)
    assert twin.shape == twin.shards[0].shape == (2, 3)
    x.unsqueeze_(0)
    assert x.shape == x.shards[0].shape == (1, 3, 2)
    x.resize_(4)
    assert x.shape == x.shards[1].shape == (4,)


def test_as_strided_counts_from_where_the_tensor_starts() -> None:
    x = even(6)
    check(lambda x: x[2:].as_strided((2,), (1,), 2), x)
    memory = torch.arange(6.0)
    pieces = RankTensor(list(memory.chunk(N)))
    assert [s.tolist() for s in pieces.as_strided((1,), (1,), 1).shards] == [[1.0], [3.0], [5.0]]
    leaf = even(6).requires_grad_()
    leaf[2:].as_strided((2,), (1,), 3).sum().backward()
    assert leaf.grad.tolist() == [0, 0, 0, 1, 1, 0]


def test_writing_to_a_plain_tensor_needs_agreement() -> None:
    plain = torch.zeros(2)
    assert plain.add_(replicate(torch.ones(2), N)) is plain
    assert plain.tolist() == [1, 1]
    with pytest.raises(WorldError, match="replicate"):
        plain.add_(RankTensor([torch.ones(2) * r for r in range(N)]))
    assert plain.tolist() == [1, 1]
    out = torch.empty(0)
    torch.add(replicate(torch.ones(2), N), 1, out=out)
    assert out.tolist() == [2, 2]


def test_running_statistics_are_written_once_or_refused() -> None:
    norm, twin = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    x = torch.randn(5, 4)
    twin(x)
    norm(replicate(x, N))
    assert torch.equal(norm.running_mean, twin.running_mean)
    with pytest.raises(WorldError, match="plain tensor"):
        norm(even(5, 4))


def test_values_that_leave_must_agree() -> None:
    one = replicate(torch.tensor(2.5), N)
    assert one.item() == 2.5
    assert bool(one)
    assert float(one) == 2.5
    assert f"{one:.2f}" == "2.50"
    assert replicate(torch.tensor([1.0, float("nan")]), N).tolist()[0] == 1.0
    assert replicate(torch.arange(2), N).numpy().tolist() == [0, 1]
    assert torch.equal(replicate(torch.ones(2), N), replicate(torch.ones(2), N))
    assert replicate(torch.tensor(float("nan")), N).isnan().item()
    many = RankTensor([torch.tensor(float(r // 2)) for r in range(N)])
    with pytest.raises(WorldError, match=r"_local_scalar_dense.*0\.0 on ranks 0, 1; 1\.0 on rank 2"):
        many.item()
    for leave in (bool, float, RankTensor.tolist, RankTensor.numpy, common, "{:.2f}".format):
        with pytest.raises(WorldError, match="rank"):
            leave(many)
    assert "rank 2" in f"{many}"


def test_len_and_iteration() -> None:
    x = even(2, 3)
    assert len(x) == 2
    assert [row.shape for row in x] == [(3,), (3,)]
    with pytest.raises(WorldError, match=r"\(3 \| 2 \| 1\)"):
        len(uneven(4))
    with pytest.raises(WorldError, match="differ"):
        list(uneven(4))


def test_shards_must_fit_together() -> None:
    with pytest.raises(WorldError, match="ndim"):
        RankTensor([torch.ones(2), torch.ones(2, 2)])
    with pytest.raises(WorldError, match="dtype"):
        RankTensor([torch.ones(2), torch.ones(2, dtype=torch.float64)])
    with pytest.raises(WorldError, match="device"):
        RankTensor([torch.ones(2), torch.ones(2, device="meta")])
    with pytest.raises(WorldError, match="at least one tensor"):
        RankTensor([])
    with pytest.raises(WorldError, match="2 and 3 ranks"):
        _ = RankTensor([torch.ones(2)] * 2) + RankTensor([torch.ones(2)] * 3)


def test_repr() -> None:
    assert repr(replicate(torch.ones(1), N)) == "RankTensor(tensor([1.]), same on all 3 ranks)"
    assert "and those of 2 other ranks" in repr(replicate(torch.ones(1, device="meta"), N))
    x = RankTensor([torch.tensor([float(r)]) for r in range(20)]).requires_grad_()
    text = repr(x)
    assert "rank 0: tensor([0.])" in text
    assert "... 14 more ranks" in text
    assert "rank 19: tensor([19.])" in text
    assert "requires_grad=True" in text
    assert "MulBackward0" in repr(x * 2)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch"])
@pytest.mark.parametrize("parameter", [False, True])
def test_copies(how: str, parameter: bool) -> None:
    x = uneven(4)
    x = nn.Parameter(x) if parameter else x.requires_grad_()
    if how == "deepcopy":
        x.grad = x.detach() * 2
        y = copy.deepcopy(x)
        assert torch.equal(y.grad.shards[1], x.grad.shards[1])
    elif how == "pickle":
        y = pickle.loads(pickle.dumps(x))
    else:
        file = io.BytesIO()
        torch.save({"x": x}, file)
        file.seek(0)
        y = torch.load(file, weights_only=True)["x"]
    assert isinstance(y, nn.Parameter) == parameter
    assert isinstance(y, RankTensor)
    assert y.requires_grad
    for a, b in zip(x.shards, y.shards, strict=True):
        assert torch.equal(a, b)
        assert a.data_ptr() != b.data_ptr()
    with pytest.raises(RuntimeError, match="detach"):
        copy.deepcopy(x * 2)


def test_data_keeps_wrapper_and_shards_in_step() -> None:
    p = nn.Parameter(even(2, 3))
    other = uneven(4)
    p.data = other
    assert p.shards is other.shards
    assert values_of(p.shape[0]) == (3, 2, 1)
    p.data = p.data.double()
    assert p.dtype == p.shards[0].dtype == torch.float64
    with pytest.raises(WorldError, match="replicate"):
        p.data = torch.ones(2)
    module = nn.Linear(2, 2)
    module.weight = nn.Parameter(even(2, 2))
    weight = module.weight
    module.double()
    assert module.weight is weight
    assert weight.shards[2].dtype == torch.float64


def test_no_memory_of_its_own() -> None:
    for use in (torch.from_dlpack, RankTensor.share_memory_):
        with pytest.raises(RuntimeError):
            use(even(2))


def test_random_ops_draw_as_processes_with_one_seed() -> None:
    torch.manual_seed(3)
    want = torch.rand(4), torch.rand(4)
    torch.manual_seed(3)
    x = replicate(torch.zeros(4), N)
    got = torch.rand_like(x), x.uniform_()
    for g, w in zip(got, want, strict=True):
        assert torch.equal(common(g), w)
    mine = torch.Generator().manual_seed(5)
    want = torch.empty(4).normal_(generator=torch.Generator().manual_seed(5))
    assert torch.equal(common(x.normal_(generator=mine)), want)
    assert common(F.dropout(replicate(torch.ones(100), N))).sum() > 0


def test_inference_mode() -> None:
    x = uneven(4)
    with torch.inference_mode():
        check(lambda x: F.linear(x, torch.ones(2, 4)), x)
        check(lambda x: x.view(-1), x)
        check(lambda x: x.reshape(-1, 2) + 1, x)
        check(lambda x: x.detach(), x)
        y = x + 1
        check(lambda y: y.view(-1).contiguous(), y)


def test_map_ranks_and_replicate() -> None:
    x = even(2)
    y = map_ranks(lambda rank, a, b, k: a * rank + b + k, x, torch.ones(2), rank_int([0, 1, 2]))
    for rank in range(N):
        assert torch.equal(y.shards[rank], x.shards[rank] * rank + 1 + rank)
    first, second = map_ranks(lambda rank, a: (a, a.sum()), x.requires_grad_())
    assert not first.requires_grad
    assert second.dim() == 0
    with simulate(4):
        assert [s.item() for s in map_ranks(lambda rank: torch.tensor(rank)).shards] == [0, 1, 2, 3]
        z = replicate(torch.ones(2))
        assert len({s.data_ptr() for s in z.shards}) == 4
    with pytest.raises(WorldError, match="number of ranks"):
        replicate(torch.ones(2))


def test_other_subclasses_go_first() -> None:
    class Other(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            return torch.full((), 7.0)

    other = torch.ones(2).as_subclass(Other)
    assert (even(2) + other).item() == 7


def test_contiguous_where_some_ranks_are() -> None:
    """One row of an expanded tensor is contiguous, several are not."""
    x = RankTensor([torch.ones(1, 3).expand(rows, 3) for rows in (2, 1)])
    made = x.contiguous()
    assert [shard.stride() for shard in made.shards] == [(3, 1), (3, 1)]
    assert made.contiguous() is made
