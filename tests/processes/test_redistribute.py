"""Redistribution between real processes: every pair of placements gives every rank what it should hold."""

import itertools
import time
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise import (
    CostModel,
    DTensor,
    InterleavedShard,
    P,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    using_cost_model,
)
from shardwise.comm.groups import axis_sets
from shardwise.errors import CommunicationError
from tests.processes.pool import on_processes
from tests.processes.reference import assert_same, cut, mesh_of, plain_placements, random_case

MESHES = [(4,), (2, 2), (1, 4)]


class Collectives(TorchDispatchMode):
    """The collectives called, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "_c10d_functional" and "wait" not in str(func):
            self.names.append(func._schema.name.removeprefix("_c10d_functional::"))
        return func(*args, **(kwargs or {}))


@contextmanager
def no_new_groups():
    """Inside, making a process group is an error."""

    def refuse(*args, **kwargs):
        raise AssertionError("a process group is made in the middle of a program")

    original, dist.new_group = dist.new_group, refuse
    try:
        yield
    finally:
        dist.new_group = original


def check(case) -> None:
    at = case.mesh.get_coordinate()
    source = case.distributed()
    target = source.redistribute(placements=case.target)
    assert_same(target.full_tensor(), case.whole, str(case))
    if not any(p.is_partial() for p in target.placements):
        assert_same(target.to_local(), cut(case.whole, case.mesh, case.target, at), str(case))
    assert_same(source.full_tensor(), case.whole, str(case))  # untouched


@pytest.mark.parametrize("sizes", MESHES)
@pytest.mark.parametrize("part", range(2))
@on_processes
def test_random_pairs(sizes, part) -> None:
    mesh = mesh_of(*sizes)
    for seed in range(60 * part, 60 * (part + 1)):
        check(random_case(seed, mesh))


@pytest.mark.parametrize("shape", [(8, 8), (5, 3)])
@on_processes
def test_all_plain_pairs_on_a_square_mesh(shape) -> None:
    mesh = mesh_of(2, 2)
    whole = torch.arange(1.0, 1 + 8 * 8)[: shape[0] * shape[1]].view(shape)
    with no_new_groups():
        for source in plain_placements(mesh, 2)[::2]:
            x = distribute_tensor(whole, mesh, source)
            for target in plain_placements(mesh, 2):
                assert_same(x.redistribute(placements=target).full_tensor(), whole, f"{source} -> {target}")


@on_processes
def test_one_collective_where_one_will_do() -> None:
    line, square = mesh_of(4), mesh_of(2, 2)
    even, odd, long = torch.randn(8, 8), torch.randn(5, 7), torch.randn(101, 42)
    table = [
        (line, even, [Shard(0)], [Shard(1)], ["all_to_all_single"]),
        (line, odd, [Shard(0)], [Shard(1)], ["all_to_all_single"]),
        (line, even, [Shard(0)], [Replicate()], ["all_gather_into_tensor"]),
        (line, odd, [Shard(0)], [Replicate()], ["all_to_all_single"]),  # 5 rows: padded they would be 8
        (line, long, [Shard(0)], [Replicate()], ["all_gather_into_tensor"]),
        (line, long, [Shard(1)], [Replicate()], ["all_gather_into_tensor"]),
        (line, long, [Partial()], [Shard(0)], ["reduce_scatter_tensor"]),
        (line, long, [Partial()], [Shard(1)], ["reduce_scatter_tensor"]),
        (line, long, [Shard(0)], [Shard(1)], ["all_to_all_single"]),
        (line, even, [Partial()], [Replicate()], ["all_reduce"]),
        (line, even, [Partial()], [Shard(0)], ["reduce_scatter_tensor"]),
        (line, even, [Replicate()], [Shard(0)], []),
        (line, even, [Replicate()], [Partial()], []),
        (line, even, [Shard(0)], [Partial()], []),
        (line, even, [InterleavedShard(0, 2)], [Shard(0)], ["all_to_all_single"]),
        (square, even, [Shard(0), Shard(1)], [Replicate(), Replicate()], ["all_gather_into_tensor"]),
        (square, even, [Shard(0), Shard(1)], [Shard(1), Shard(0)], ["all_to_all_single"]),
        (square, even, [Partial(), Partial()], [Replicate(), Replicate()], ["all_reduce"]),
        (square, odd, [Partial(), Partial("avg")], [Replicate(), Replicate()], ["all_reduce"]),
        (square, even, P(("a", "b")), P(("b", "a")), ["all_to_all_single"]),
    ]
    for mesh, whole, source, target, expected in table:
        x = distribute_tensor(whole, mesh, source)
        with Collectives() as called:
            y = x.redistribute(placements=target)
        assert called.names == expected, f"{source} -> {target}: {called.names}"
        torch.testing.assert_close(y.full_tensor(), whole)


@pytest.mark.parametrize(
    "latency", [{"p2p_latency": 10.0}, {"latency": 10.0, "p2p_latency": 0.0}], ids=["padded", "exact"]
)
@on_processes
def test_uneven_shards_padded_or_exchanged(latency) -> None:
    line, square = mesh_of(4), mesh_of(2, 2)
    cases = [
        (line, P("a")),
        (line, P(None, "a")),
        (square, P(("a", "b"))),
        (square, P(("b", "a"))),
        (square, P("b", "a")),
        (line, [InterleavedShard(0, 2)]),
    ]
    with using_cost_model(CostModel(**latency)):
        for size, (mesh, placements) in itertools.product((6, 10), cases):
            for dtype in (torch.float32, torch.int16, torch.bool):
                whole = torch.randint(0, 5, (size, 7)).to(dtype)
                x = distribute_tensor(whole, mesh, placements)
                with Collectives() as called:
                    gathered = x.redistribute(placements=P())
                assert not set(called.names) & {
                    "all_to_all_single" if "latency" not in latency else "all_gather_into_tensor"
                }
                assert_same(gathered.to_local(), whole)
            partial = [Partial()] * mesh.ndim
            summed = DTensor.from_local(whole.float(), mesh, partial).requires_grad_()
            scattered = summed.redistribute(placements=placements)
            assert_same(scattered.full_tensor().detach(), 4 * whole.float())
            scattered.redistribute(placements=P()).to_local().sum().backward()
            assert_same(summed.grad.full_tensor(), torch.ones(size, 7))


@on_processes
def test_operands_are_put_in_place_box_by_box() -> None:
    # An uneven interleaved cut has several boxes on a rank, and their order is not that of the result.
    mesh = mesh_of(4)
    for dtype, op in [(torch.int16, "max"), (torch.float32, "sum"), (torch.bool, "product")]:
        operands = torch.randint(0, 3, (4, 4, 6, 2)).to(dtype)
        x = DTensor.from_local(operands[dist.get_rank()], mesh, [Partial(op)])
        y = x.redistribute(placements=[InterleavedShard(1, 2)])
        whole = {"max": operands.amax, "sum": operands.sum, "product": operands.all}[op](0)
        assert_same(y.to_local(), cut(whole, mesh, [InterleavedShard(1, 2)], [dist.get_rank()]))


@on_processes
def test_float8_to_partial_max() -> None:
    whole = torch.arange(8.0).to(torch.float8_e4m3fn)
    x = distribute_tensor(whole, mesh_of(4), [Shard(0)])
    assert_same(x.redistribute(placements=[Partial("max")]).full_tensor(), whole)


@on_processes
def test_nothing_to_do_gives_the_same_data() -> None:
    x = distribute_tensor(torch.randn(8), mesh_of(4), [Shard(0)])
    with Collectives() as called:
        y = x.redistribute(placements=[Shard(-1)])
    assert called.names == []
    assert y.to_local().data_ptr() == x.to_local().data_ptr()


@on_processes
def test_async_results_are_waited_for_on_first_use() -> None:
    mesh = mesh_of(2, 2)
    whole = torch.randn(8, 6)
    x = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    for target in ([Replicate(), Replicate()], [Shard(1), Shard(0)], [Partial(), Shard(0)], [Shard(0), Shard(1)]):
        pending = x.redistribute(placements=target, async_op=True)
        assert pending.placements == tuple(target)
        assert pending.shape == whole.shape
        assert isinstance(pending, DTensor)
        assert_same(pending.full_tensor(), whole)
    several = [x.redistribute(placements=[Replicate(), Replicate()], async_op=True) for _ in range(4)]
    for pending in reversed(several):
        assert_same(pending.to_local(), whole)
    x.redistribute(placements=[Replicate(), Replicate()], async_op=True)  # dropped: waited for all the same
    total = x.redistribute(placements=[Replicate(), Replicate()], async_op=True) + x
    assert_same(total.full_tensor(), whole + whole)


@pytest.mark.parametrize("writer", [0, 3])
@on_processes
def test_a_source_may_be_written_while_its_redistribution_is_under_way(writer) -> None:
    mesh, whole = mesh_of(4), torch.arange(float(1 << 20)).view(1024, 1024)
    for source, target in (
        (Shard(0), Replicate()),
        (Shard(1), Replicate()),
        (Shard(0), Shard(1)),
        (Partial(), Shard(0)),
        (Partial(), Replicate()),
    ):
        x = distribute_tensor(whole, mesh, [source])
        dist.barrier()
        if dist.get_rank() != writer:
            time.sleep(0.1)  # the writer's data is on its way only when the others are there
        y = x.redistribute(placements=[target], async_op=True)
        x.to_local().fill_(-1.0)
        assert_same(y.full_tensor(), whole, f"{source} to {target}")


@on_processes
def test_another_dtype_on_the_way() -> None:
    mesh = mesh_of(4)
    whole = torch.randn(8, 8)
    x = distribute_tensor(whole, mesh, [Shard(0)]).requires_grad_()
    y = x.redistribute(placements=[Replicate()], forward_dtype=torch.bfloat16, backward_dtype=torch.float64)
    assert_same(y.to_local().detach(), whole.bfloat16())
    y.to_local().sum().backward()
    assert x.grad.dtype == torch.float32
    assert_same(x.grad.full_tensor(), torch.ones(8, 8))


@on_processes
def test_reductions_without_a_meaning_are_refused_by_all_ranks_alike() -> None:
    mesh = mesh_of(4)
    table = [
        (torch.int64, "avg", "torch.int64: an average needs a floating-point dtype: cast first, e.g. x.float()"),
        (torch.complex64, "max", "torch.complex64: complex numbers have no order: use Partial('sum') or 'product'"),
    ]
    for dtype, op, message in table:
        with pytest.raises(CommunicationError) as caught:
            DTensor.from_local(torch.ones(4, dtype=dtype), mesh, [Partial(op)])
        assert str(caught.value) == f"Partial({op}) cannot reduce {message}"


# ---- groups and submeshes --------------------------------------------------------------------------------------------


@on_processes
def test_all_groups_are_made_with_the_first_tensor() -> None:
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("x", "y", "z"))
    first = distribute_tensor(torch.arange(12.0).view(3, 4), mesh, [Shard(0), Replicate(), Shard(1)])
    groups = first._spec.mesh_info.groups
    assert set(groups) == {(0,), (1,), (2,), *axis_sets(3)}
    with no_new_groups():
        again = distribute_tensor(torch.randn(4, 4), mesh, P(("x", "z")))
        assert again._spec.mesh_info.groups is groups
        for target in (P(("z", "x")), P("z", "x"), P(None, ("z", "y", "x")), P()):
            moved = again.redistribute(placements=target)
            assert_same(moved.full_tensor(), again.full_tensor())


@on_processes
def test_two_meshes_side_by_side() -> None:
    line, square = mesh_of(4), mesh_of(2, 2)
    backwards = init_device_mesh("cpu", (2, 2), mesh_dim_names=("p", "q"))
    whole = torch.randn(6, 5)
    with no_new_groups():
        xs = [distribute_tensor(whole, line, [Shard(1)]), distribute_tensor(whole, square, [Shard(1), Shard(0)])]
        for x in xs:
            assert_same(x.full_tensor(), whole)
    y = distribute_tensor(whole, backwards, P(("q", "p")))
    assert_same(y.full_tensor(), whole)
    assert_same(xs[0].redistribute(placements=[Shard(0)]).full_tensor(), whole)


@on_processes
def test_a_submesh_has_a_tensor_of_its_own_in_each_instance() -> None:
    mesh = mesh_of(2, 2)
    row = dist.get_rank() // 2
    whole = torch.arange(6.0).view(3, 2) + 100 * row  # a different tensor in each row of the mesh
    x = distribute_tensor(whole, mesh["b"], [Shard(0)])
    assert x.device_mesh == mesh["b"]
    assert_same(x.to_local(), whole.chunk(2)[dist.get_rank() % 2])
    assert_same(x.redistribute(placements=[Shard(1)]).full_tensor(), whole)
    y = DTensor.from_local(x.to_local(), mesh["b"], [Shard(0)], run_check=True)
    assert y.shape == whole.shape
    assert_same(y.full_tensor(), whole)
    column = distribute_tensor(torch.full((4,), float(dist.get_rank() % 2)), mesh["a"], [Partial()])
    assert_same(column.full_tensor(), torch.full((4,), float(dist.get_rank() % 2)))


@pytest.mark.parametrize("ranks", [[2, 0, 3, 1], [[3, 1], [0, 2]], [[0, 2], [1, 3]], [3, 0]], ids=str)
@on_processes
def test_ranks_in_any_order(ranks) -> None:
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("a", "b")[: torch.tensor(ranks).dim()])
    if dist.get_rank() not in mesh.mesh:
        return
    for seed in range(12):
        check(random_case(seed, mesh))
    whole = torch.arange(12.0).view(6, 2)
    x = distribute_tensor(whole, mesh, [Shard(0)] * mesh.ndim)  # the first rank of the mesh sends
    assert_same(x.to_local(), cut(whole, mesh, [Shard(0)] * mesh.ndim, mesh.get_coordinate()))


@on_processes
def test_flattened_axes() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("f", "g"))
    flat = mesh["f", "g"]._flatten("fg")
    whole = torch.randn(10, 3)
    x = distribute_tensor(whole, flat, [Shard(0)])
    assert_same(x.to_local(), cut(whole, flat, [Shard(0)], [dist.get_rank()]))
    assert_same(x.redistribute(placements=[Shard(1)]).full_tensor(), whole)
    with no_new_groups():  # the flattened mesh brought the group of both axes
        y = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
        assert_same(y.full_tensor(), whole)
