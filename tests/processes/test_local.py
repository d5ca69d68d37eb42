"""Global tensors distributed, local tensors assembled, and what happens when the ranks do not fit."""

import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise import DTensor, InterleavedShard, P, Partial, Replicate, Shard, distribute_tensor, local_map
from shardwise.debug import CommDebugMode, check_local_tensors
from shardwise.errors import ShapeError
from shardwise.parallel import SequenceParallel, parallelize_module
from tests.processes.pool import on_processes
from tests.processes.reference import DTYPES, SHAPES, assert_same, cut, mesh_of, random_case

ALL = [torch.float64, torch.float16, torch.int32, torch.uint8, torch.complex128, torch.float8_e5m2, *DTYPES]


def mine(fill: float) -> torch.Tensor:
    return torch.full((4, 5), float(fill + dist.get_rank()))


# ---- distribute_tensor -----------------------------------------------------------------------------------------------


@on_processes
def test_the_source_rank_hands_out_its_data() -> None:
    line, square = mesh_of(4), mesh_of(2, 2)
    for source in range(4):
        for placements in ([Shard(0)], [Shard(1)], [Replicate()], [Partial()], [InterleavedShard(0, 2)]):
            x = distribute_tensor(mine(10), line, placements, src_data_rank=source)
            assert_same(x.full_tensor(), torch.full((4, 5), 10.0 + source), f"{placements} from {source}")
    for source, rank in ((0, 0), (1, 3)):  # the index on every axis
        for placements in ([Shard(0), Shard(1)], [Shard(0), Replicate()], P(None, ("b", "a")), P(partial={"a": "max"})):
            x = distribute_tensor(mine(10), square, placements, src_data_rank=source)
            assert_same(x.full_tensor(), torch.full((4, 5), 10.0 + rank), f"{placements} from {source}")


@on_processes
def test_without_a_source_each_rank_cuts_its_own() -> None:
    x = distribute_tensor(mine(0), mesh_of(4), [Shard(0)], src_data_rank=None)
    assert_same(x.to_local(), torch.full((1, 5), float(dist.get_rank())))
    assert_same(x.full_tensor(), torch.arange(4.0).view(4, 1).expand(4, 5))
    y = distribute_tensor(torch.arange(7.0), mesh_of(2, 2), P(("b", "a")), src_data_rank=None)
    assert_same(y.full_tensor(), torch.arange(7.0))


@pytest.mark.parametrize("sizes", [(4,), (2, 2), (1, 4)])
@on_processes
def test_any_placement_dtype_and_shape(sizes) -> None:
    mesh = mesh_of(*sizes)
    for seed in range(60):
        case = random_case(1000 + seed, mesh)
        x = distribute_tensor(case.whole, mesh, case.target)
        assert_same(x.full_tensor(), case.whole, str(case))
        if not any(p.is_partial() for p in x.placements):
            assert_same(x.to_local(), cut(case.whole, mesh, case.target, mesh.get_coordinate()), str(case))


@on_processes
def test_every_dtype_travels() -> None:
    mesh = mesh_of(2, 2)
    for dtype in ALL:
        whole = torch.randint(0, 2, (6, 5)).to(dtype)
        x = distribute_tensor(whole, mesh, [Shard(0), Replicate()])
        for target in ([Replicate(), Shard(1)], [Shard(1), Shard(0)], [Replicate(), Replicate()]):
            assert_same(x.redistribute(placements=target).full_tensor(), whole, f"{dtype} to {target}")
        again = DTensor.from_local(x.to_local(), mesh, [Shard(0), Replicate()], run_check=True)
        assert_same(again.full_tensor(), whole, str(dtype))


@on_processes
def test_what_is_kept_of_the_whole_tensor() -> None:
    mesh = mesh_of(4)
    assert distribute_tensor(torch.randn(4, requires_grad=True), mesh, [Shard(0)]).requires_grad
    parameter = distribute_tensor(torch.nn.Parameter(torch.randn(4), requires_grad=False), mesh, [Shard(0)])
    assert isinstance(parameter, torch.nn.Parameter)
    assert isinstance(parameter, DTensor)
    assert not parameter.requires_grad
    transposed = torch.randn(6, 4).t()
    assert_same(distribute_tensor(transposed, mesh, [Shard(0)]).full_tensor(), transposed)
    with mesh:
        assert distribute_tensor(torch.ones(4), placements=[Shard(0)]).device_mesh == mesh


# ---- from_local and to_local -----------------------------------------------------------------------------------------


@on_processes
def test_run_check_puts_uneven_shards_together() -> None:
    for mesh in (mesh_of(4), mesh_of(2, 2), mesh_of(1, 4)):
        for shape in SHAPES:
            whole = torch.randn(shape)
            choices = [[Shard(dim)] * mesh.ndim for dim in range(len(shape))] or [[Replicate()] * mesh.ndim]
            choices += [[Shard(0), Shard(1)]] if len(shape) > 1 and mesh.ndim == 2 else []
            choices += [P(("b", "a"))] if shape and mesh.ndim == 2 else []
            for placements in choices:
                local = cut(whole, mesh, placements, mesh.get_coordinate())
                x = DTensor.from_local(local, mesh, placements, run_check=True)
                assert x.shape == shape, f"{placements} of {shape} over {mesh}: {x.shape}"
                assert_same(x.full_tensor(), whole)


@on_processes
def test_nothing_is_communicated_by_default() -> None:
    mesh = mesh_of(2, 2)
    whole = torch.randn(4, 6)
    for placements in ([Shard(0), Shard(1)], [Shard(1), Replicate()], P(("b", "a")), [Replicate(), Partial()]):
        local = cut(whole, mesh, placements, mesh.get_coordinate())
        double = local_map(lambda x: x * 2, out_placements=placements)
        with CommDebugMode() as comm:
            x = DTensor.from_local(local, mesh, placements)
            y = double(x)
        assert comm.get_total_counts() == 0
        assert x.shape == y.shape == whole.shape
        assert x.to_local().data_ptr() == local.data_ptr()


@on_processes
def test_local_map_on_uneven_shards_communicates_nothing() -> None:
    mesh = mesh_of(4)
    for size in (1, 5, 7, 10):
        x = distribute_tensor(torch.randn(size, 3), mesh, [Shard(0)])
        with CommDebugMode() as comm:
            y = local_map(lambda x: x.t() * 2, out_placements=[Shard(1)])(x)
        assert comm.get_total_counts() == 0
        assert_same(y.full_tensor(), x.full_tensor().t() * 2)


@on_processes
def test_the_checks_of_debug_find_a_wrong_assumption() -> None:
    mesh, rank = mesh_of(4), dist.get_rank()
    with check_local_tensors():
        assert DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)]).shape == (8, 3)
        for _ in range(2):
            with pytest.raises(ShapeError, match=r"assumes shards of equal shape.*rank [03] holds"):
                DTensor.from_local(torch.ones([3, 3, 3, 1][rank]), mesh, [Shard(0)])
        with pytest.raises(ShapeError, match=r"different shapes for one tensor: \[10\] on rank 0.*\[9\] on rank 3"):
            DTensor.from_local(torch.ones([3, 3, 3, 1][rank]), mesh, [Shard(0)], shape=(10 - rank // 3,))
        with pytest.raises(ShapeError, match="replicated over a, but rank 1 holds other values than rank 0"):
            DTensor.from_local(torch.full((2,), float(rank)), mesh, [Replicate()])
        style = SequenceParallel(sequence_dim=0)
        norm = parallelize_module(torch.nn.LayerNorm(3), mesh, style)
        with pytest.raises(ShapeError, match=r"a module's plain input cannot be a shard.*use_local_output=False"):
            norm(torch.ones(1 + rank // 3, 3))
    with CommDebugMode() as comm:  # what was checked is not asked for again
        DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])
    assert comm.get_total_counts() == 0


@on_processes
def test_parts_that_are_no_cut_are_refused_by_all_ranks_alike() -> None:
    mesh = mesh_of(4)
    rows = [2, 2, 1, 2][dist.get_rank()]
    with pytest.raises(ShapeError) as caught:
        DTensor.from_local(torch.zeros(rows, 3), mesh, [Shard(0)], run_check=True)
    assert str(caught.value) == (
        "from_local got local tensors that are not the shards of a tensor of shape [7, 3] with the placements "
        "[Shard(dim=0)] over mesh(a=4): "
        "rank 2 holds [1, 3] instead of [2, 3], rank 3 holds [2, 3] instead of [1, 3]: "
        "pass the right shape=, shard as torch.chunk does, or use other placements"
    )
    with pytest.raises(ShapeError) as caught:  # the other dim differs
        DTensor.from_local(torch.zeros(2, 3 + dist.get_rank() // 3), mesh, [Shard(0)], run_check=True)
    assert "rank 3 holds [2, 4] instead of [2, 3]" in str(caught.value)
    with pytest.raises(ShapeError) as caught:  # so does the number of dims
        DTensor.from_local(torch.zeros([2] * (1 + dist.get_rank() % 2)), mesh, [Shard(0)], run_check=True)
    assert str(caught.value) == (
        "from_local got local tensors that differ in dtype or number of dims: rank 0 holds torch.float32 of 1 dims, "
        "rank 1 holds torch.float32 of 2 dims, rank 2 holds torch.float32 of 1 dims, "
        "rank 3 holds torch.float32 of 2 dims: pass tensors of one dtype and one number of dims on all ranks"
    )
    dist.barrier()  # all ranks are still in step


@on_processes
def test_refusals_name_the_ranks_of_the_submesh() -> None:
    mesh = mesh_of(2, 2)["b"]
    with pytest.raises(ShapeError) as caught:
        DTensor.from_local(torch.zeros(1 + 2 * (dist.get_rank() % 2)), mesh, [Shard(0)], run_check=True)
    row = dist.get_rank() // 2
    assert f"rank {2 * row} holds [1] instead of [2], rank {2 * row + 1} holds [3] instead of [2]" in str(caught.value)


@on_processes
def test_run_check_compares_dtypes_and_copies_to_replicas() -> None:
    mesh = mesh_of(2, 2)
    x = DTensor.from_local(torch.full((3,), float(dist.get_rank())), mesh, [Shard(0), Replicate()], run_check=True)
    assert_same(x.to_local(), torch.full((3,), float(dist.get_rank() // 2 * 2)))
    assert_same(x.full_tensor(), torch.tensor([0.0, 0, 0, 2, 2, 2]))
    other = torch.ones(3, dtype=torch.float64 if dist.get_rank() == 1 else torch.float32)
    with pytest.raises(
        ShapeError, match=r"rank 0 holds torch\.float32 of 1 dims, rank 1 holds torch\.float64 of 1 dim"
    ):
        DTensor.from_local(other, mesh, [Replicate(), Replicate()], run_check=True)
    longer = torch.ones(4 if dist.get_rank() == 2 else 3)
    with pytest.raises(ShapeError, match=r"rank 2 holds \[4\] instead of \[3\]"):
        DTensor.from_local(longer, mesh, [Replicate(), Replicate()], run_check=True)
    local = torch.zeros(3, requires_grad=dist.get_rank() != 1)
    with pytest.raises(ShapeError, match="rank 1 holds one with requires_grad=False, rank 2 holds one with requires"):
        DTensor.from_local(local, mesh, [Shard(0), Shard(0)], run_check=True)
    dist.barrier()


@on_processes
def test_a_given_shape_and_stride_are_taken() -> None:
    mesh = mesh_of(4)
    whole = torch.arange(15.0).view(3, 5).t()  # column-major
    local = cut(whole, mesh, [Shard(0)], [dist.get_rank()])
    x = DTensor.from_local(local, mesh, [Shard(0)], shape=whole.shape, stride=whole.stride())
    assert (x.shape, x.stride()) == (whole.shape, whole.stride())
    assert_same(x.full_tensor(), whole)
    assert DTensor.from_local(local, mesh, [Shard(0)], run_check=True).stride() == whole.stride()


# ---- factories -------------------------------------------------------------------------------------------------------


@on_processes
def test_factories() -> None:
    mesh = mesh_of(2, 2)
    for placements in ([Shard(0), Shard(1)], [Shard(0), Replicate()], P(("b", "a")), P("a", partial={"b": "sum"})):
        options = {"device_mesh": mesh, "placements": placements}
        assert_same(shardwise.zeros(5, 3, **options).full_tensor(), torch.zeros(5, 3))
        assert_same(shardwise.ones((5, 3), dtype=torch.int16, **options).full_tensor(), torch.ones(5, 3).short())
        assert_same(shardwise.full([5, 3], 7.5, **options).full_tensor(), torch.full((5, 3), 7.5))
        assert shardwise.empty(5, 3, **options).shape == (5, 3)
    assert_same(shardwise.full((), True, device_mesh=mesh).full_tensor(), torch.tensor(True))


def random_numbers() -> dict[str, torch.Tensor]:
    """Numbers from one seed, drawn under three meshes in turn."""
    torch.manual_seed(3)
    found = {}
    for sizes, placements in (((4,), [Shard(0)]), ((2, 2), [Shard(1), Shard(0)]), ((4,), [Replicate()])):
        options = {"device_mesh": mesh_of(*sizes), "placements": placements}
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            name = f"{sizes} {placements} {dtype}"
            found[f"rand {name}"] = shardwise.rand(7, 5, dtype=dtype, **options).full_tensor()
            found[f"randn {name}"] = shardwise.randn(7, 5, dtype=dtype, **options).full_tensor()
    found["after"] = torch.rand(3)
    return found


@on_processes
def compare_random_numbers(expected: dict[str, torch.Tensor]) -> None:
    for name, numbers in random_numbers().items():
        assert_same(numbers, expected[name], name)


def test_random_numbers_are_those_of_the_simulated_world() -> None:
    mesh_of.cache_clear()
    with shardwise.simulate(4):
        expected = {
            name: numbers.shards[0] if isinstance(numbers, shardwise.RankTensor) else numbers
            for name, numbers in random_numbers().items()
        }
    mesh_of.cache_clear()
    compare_random_numbers(expected=expected)


@on_processes
def test_random_numbers_do_not_depend_on_the_cut() -> None:
    drawn = []
    for sizes, placements in (((4,), [Shard(0)]), ((2, 2), P(("b", "a"))), ((1, 4), [Replicate(), Partial()])):
        torch.manual_seed(5)
        options = {"device_mesh": mesh_of(*sizes), "placements": placements}
        drawn.append([shardwise.randn(6, 5, **options).full_tensor(), shardwise.rand(9, **options).full_tensor()])
        drawn[-1].append(torch.rand(2))
    for others in drawn[1:]:
        for one, other in zip(drawn[0], others, strict=True):
            assert_same(one, other)


@on_processes
def test_one_rank_may_look_at_its_shard_between_two_ops_that_gather() -> None:
    mesh = mesh_of(4)
    x = distribute_tensor(torch.arange(32.0).view(8, 4), mesh, [Shard(0)])
    weight = distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)])
    for _ in range(2):
        weight @ x
        if dist.get_rank() == 0:
            x.to_local()
        assert_same((weight @ x).full_tensor(), torch.ones(8, 8) @ torch.arange(32.0).view(8, 4))
