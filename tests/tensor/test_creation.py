"""Factories: filled in place on every rank, never from a whole tensor, and random numbers that ignore the cut."""

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise import (
    InterleavedShard,
    P,
    Partial,
    RankTensor,
    Replicate,
    Shard,
    distribute_tensor,
    empty,
    full,
    ones,
    rand,
    randn,
    zeros,
)
from shardwise.errors import InputError, MeshError, PlacementError
from shardwise.testing import assemble
from tests.worlds import mesh_of

PLACEMENTS = list(itertools.product([Shard(0), Shard(1), Replicate(), Partial(), Partial("max")], repeat=2))


@pytest.fixture
def mesh():
    with mesh_of(2, 3) as mesh:
        yield mesh


@pytest.mark.parametrize("shape", [(6, 6), (5, 4), (1, 2), (0, 3)], ids=str)
def test_values(mesh, shape):
    for placements in PLACEMENTS:
        options = {"device_mesh": mesh, "placements": placements}
        assert torch.equal(assemble(zeros(shape, **options)), torch.zeros(shape))
        assert torch.equal(assemble(ones(shape, **options)), torch.ones(shape))
        assert torch.equal(assemble(full(shape, -2.5, **options)), torch.full(shape, -2.5))
        made = empty(shape, **options)
        assert (made.shape, made.placements) == (shape, placements)


@pytest.mark.parametrize("make", [zeros, ones, empty, rand, randn])
def test_sizes_as_ints_or_as_one_sequence(mesh, make):
    options = {"device_mesh": mesh, "placements": [Shard(0), Replicate()]}
    for size in [(4, 3), ((4, 3),), ([4, 3],), (torch.Size([4, 3]),)]:
        assert make(*size, **options).shape == (4, 3)
    assert make(5, **options).shape == (5,)
    assert make((), device_mesh=mesh).shape == ()
    assert make(device_mesh=mesh).shape == ()


@pytest.mark.parametrize("make", [zeros, ones, empty, rand, randn])
def test_dtype_and_requires_grad(mesh, make):
    options = {"device_mesh": mesh, "placements": [Shard(0), Replicate()]}
    assert make(4, **options).dtype == torch.float32
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        x = make(4, dtype=dtype, requires_grad=True, **options)
        assert (x.dtype, x.to_local().dtype, x.requires_grad, x.is_leaf) == (dtype, dtype, True, True)
    assert not make(4, **options).requires_grad


@pytest.mark.parametrize("value", [1, 1.5, True, 1j])
def test_full_takes_the_dtype_of_its_value(mesh, value):
    x = full((4,), value, device_mesh=mesh)
    assert torch.equal(assemble(x), torch.full((4,), value))
    assert full((4,), value, dtype=torch.complex128, device_mesh=mesh).dtype == torch.complex128


def test_default_dtype(mesh):
    torch.set_default_dtype(torch.float64)
    try:
        assert zeros(3, device_mesh=mesh).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_integer_factories(mesh):
    x = ones(5, dtype=torch.int64, device_mesh=mesh, placements=[Shard(0), Partial()])
    assert torch.equal(assemble(x), torch.ones(5, dtype=torch.int64))


def test_mesh_from_the_context(mesh):
    with mesh:
        assert zeros(4).placements == (Replicate(), Replicate())
        assert zeros(4).device_mesh == mesh
    with pytest.raises(MeshError, match="no device_mesh"):
        zeros(4)


def test_refuses(mesh):
    with pytest.raises(InputError, match="layout"):
        zeros(4, layout=torch.sparse_coo, device_mesh=mesh)
    with pytest.raises(PlacementError):
        zeros(4, device_mesh=mesh, placements=[Shard(1), Replicate()])


class Largest(TorchDispatchMode):
    """Records the largest tensor that any op gives back."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                sizes = [shard.numel() for shard in getattr(tensor, "shards", [tensor])]
                self.numel = max(self.numel, *sizes)
        return result


@pytest.mark.parametrize("make", [zeros, ones, empty, rand, randn, lambda *a, **k: full(a, 2.0, **k)])
def test_the_whole_is_never_built(make):
    # 6 million elements on 8 ranks: no rank, and nothing on the way, holds more than an eighth.
    with mesh_of(2, 4) as mesh, Largest() as largest:
        x = make(3000, 2000, device_mesh=mesh, placements=[Shard(0), Shard(1)])
    assert x.shape == (3000, 2000)
    assert 0 < largest.numel <= 6_000_000 // 8


# ---- random numbers ------------------------------------------------------------------------------------------------


def drawn(make, sizes, placements, shape=(6, 5), dtype=torch.float32, seed=7):
    with mesh_of(*sizes) as mesh:
        torch.manual_seed(seed)
        return assemble(make(shape, dtype=dtype, device_mesh=mesh, placements=placements))


WAYS = [
    ((1,), [Replicate()]),
    ((4,), [Shard(0)]),
    ((4,), [Shard(1)]),
    ((7,), [Shard(0)]),
    ((2, 3), [Shard(0), Shard(0)]),
    ((2, 3), P(("b", "a"))),
    ((2, 3), [Partial(), Shard(1)]),
    ((3,), [Partial("max")]),
    ((3,), [InterleavedShard(0, 2)]),
    ((2, 2, 2), [Shard(1), Replicate(), Shard(0)]),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("make", [rand, randn])
def test_random_numbers_ignore_mesh_and_placement(make, dtype):
    first, *others = (drawn(make, *way, dtype=dtype) for way in WAYS)
    assert first.unique().numel() > 20
    for other in others:
        assert torch.equal(other, first)


@pytest.mark.parametrize("make", [rand, randn])
def test_the_seed_governs(make):
    way = ((4,), [Shard(0)])
    assert torch.equal(drawn(make, *way, seed=1), drawn(make, *way, seed=1))
    assert not torch.equal(drawn(make, *way, seed=1), drawn(make, *way, seed=2))


@pytest.mark.parametrize("make", [rand, randn])
def test_every_call_draws_anew_and_alike(make):
    # Two calls give different numbers, and move the generator on as far however the tensor is cut.
    with mesh_of(4) as mesh:
        torch.manual_seed(0)
        one = make(100, device_mesh=mesh, placements=[Shard(0)])
        other = make(100, device_mesh=mesh, placements=[Shard(0)])
        after = torch.get_rng_state()
        assert not torch.equal(assemble(one), assemble(other))
        torch.manual_seed(0)
        make(100, device_mesh=mesh, placements=[Replicate()])
        make(100, device_mesh=mesh, placements=[Partial()])
        assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_rand_is_uniform(dtype):
    x = drawn(rand, (4,), [Shard(0)], (100, 1000), dtype).double()
    assert x.min() >= 0
    assert x.max() < 1
    # The mean of n uniform numbers has deviation sqrt(1 / 12 n): allow 5 of those. Coarse dtypes are rounded down.
    step = 2.0**-8 if dtype is torch.bfloat16 else 2.0**-11 if dtype is torch.float16 else 0.0
    assert abs(x.mean() + step / 2 - 0.5) < 5 * (1 / 12 / x.numel()) ** 0.5
    assert abs(x.var() - 1 / 12) < 0.002
    counts = torch.histc(x, 16, 0, 1)
    assert ((counts - x.numel() / 16).abs() < 6 * (x.numel() / 16) ** 0.5).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_randn_is_normal(dtype):
    x = drawn(randn, (4,), [Shard(0)], (100, 1000), dtype).double()
    assert x.isfinite().all()
    assert abs(x.mean()) < 5 / x.numel() ** 0.5
    assert abs(x.std() - 1) < 0.01
    # As many beyond 1, 2 and 3 deviations as a normal distribution has.
    for bound, share in [(1, 0.3173), (2, 0.0455), (3, 0.0027)]:
        assert abs((x.abs() > bound).double().mean() - share) < 6 * (share / x.numel()) ** 0.5
    # Neighbours know nothing of each other, along rows and columns.
    for one, other in [(x[:, 1:], x[:, :-1]), (x[1:], x[:-1])]:
        assert abs((one * other).mean()) < 5 / x.numel() ** 0.5


@pytest.mark.parametrize("make", [rand, randn])
def test_later_calls_are_not_shifted_copies(make):
    # Counter-based generators that step the key by one give sequences that overlap.
    with mesh_of(2) as mesh:
        one, other = (assemble(make(1000, device_mesh=mesh, placements=[Shard(0)])) for _ in range(2))
    assert torch.isin(one, other).sum() < 5


# ---- distribute_tensor -----------------------------------------------------------------------------------------------


class TestDistributeTensor:
    @pytest.mark.parametrize("shape", [(6, 6), (5, 4), (1, 2), (0, 3)], ids=str)
    @pytest.mark.parametrize("source", [0, 1, None])
    def test_values(self, mesh, shape, source):
        value = torch.randint(-9, 9, shape).float()
        for placements in [*PLACEMENTS, P(("b", "a")), P(None, ("b", "a")), P("b", partial={"a": "product"})]:
            x = distribute_tensor(value, mesh, placements, src_data_rank=source)
            assert torch.equal(assemble(x), value)

    def test_the_data_comes_from_the_source(self, mesh):
        # Only the rank at index 1 of both axes has the real data.
        value = torch.arange(30.0).view(5, 6)
        per_rank = RankTensor([value if rank == 4 else torch.full((5, 6), -1.0) for rank in range(6)])
        for placements in PLACEMENTS:
            assert torch.equal(assemble(distribute_tensor(per_rank, mesh, placements, src_data_rank=1)), value)

    def test_requires_grad_is_kept(self, mesh):
        for requires_grad in (False, True):
            x = distribute_tensor(torch.ones(4, requires_grad=requires_grad), mesh, [Shard(0), Replicate()])
            assert (x.requires_grad, x.is_leaf, x.grad_fn) == (requires_grad, True, None)

    def test_parameters_stay_parameters(self, mesh):
        x = distribute_tensor(torch.nn.Parameter(torch.ones(4), requires_grad=False), mesh, [Shard(0), Replicate()])
        assert isinstance(x, torch.nn.Parameter)
        assert not x.requires_grad

    def test_does_not_share_memory_with_its_source(self, mesh):
        value = torch.zeros(4)
        for placements in ([Replicate(), Replicate()], [Shard(0), Replicate()]):
            for source in (0, None):
                x = distribute_tensor(value, mesh, placements, src_data_rank=source)
                value += 1
                assert x.to_local().shards[0].max() == value.max() - 1

    def test_other_memory_orders(self, mesh):
        value = torch.arange(30.0).view(6, 5).t()
        for placements in PLACEMENTS:
            assert torch.equal(assemble(distribute_tensor(value, mesh, placements)), value)

    def test_refuses(self, mesh):
        leaf = torch.ones(4, requires_grad=True)
        with pytest.raises(InputError, match="grad_fn"):
            distribute_tensor(leaf * 2, mesh, [Shard(0), Replicate()])
        with pytest.raises(PlacementError, match="src_data_rank"):
            distribute_tensor(torch.ones(4), mesh, [Shard(0), Replicate()], src_data_rank=2)
        x = distribute_tensor(torch.ones(4), mesh, [Shard(0), Replicate()])
        assert distribute_tensor(x, mesh, [Shard(0), Replicate()]) is x
        with pytest.raises(PlacementError, match="redistribute"):
            distribute_tensor(x, mesh, [Replicate(), Replicate()])
