"""Tensors that change their mesh: values, bytes and memory, for random pairs of meshes and placements."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import shardwise
from shardwise import (
    CostModel,
    DeviceMesh,
    DTensor,
    DTensorSpec,
    P,
    Partial,
    RankTensor,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    simulate,
    using_cost_model,
)
from shardwise.comm import streaming
from shardwise.comm.mesh_change import MeshChange
from shardwise.comm.rank_group import group_over
from shardwise.debug import CommDebugMode
from shardwise.errors import MeshError
from shardwise.sharding.spec import contiguous_meta
from shardwise.testing import assemble, make_dtensor
from shardwise.testing.live_bytes import LiveBytes
from shardwise.testing.values import with_spec
from tests.comm.mesh_pairs import RANKS, Pair, Traffic, coordinates, held, needed, random_pair
from tests.worlds import fake_group

STAGINGS = (1 << 20, 1 << 20, 600, 256)


def lacking(pair: Pair, change: MeshChange) -> dict[int, int]:
    """What each rank lacks, counted element by element: the fewest that it can receive."""
    (mesh, other), (source, target), shape = pair.meshes, pair.placements, pair.value.shape
    need = needed(other, target, shape)
    if change.op:  # of each operand
        axes = [axis for axis, placement in enumerate(source) if isinstance(placement, Partial)]
        count, have = math.prod(mesh.size(axis) for axis in axes), held(mesh, source, shape)
        return {rank: count * len(wanted) - len(wanted & have.get(rank, set())) for rank, wanted in need.items()}
    if change.reduction.steps:  # on the source mesh
        reduced = DTensorSpec.from_layout(change.source.mesh_info, change.reduction.target, change.source.tensor_meta)
        numbers = with_spec(torch.arange(math.prod(shape)).view(shape), reduced, seed=0)
        have = {rank: set(shard.flatten().tolist()) for rank, shard in numbers.shards.items()}
    else:
        have = held(mesh, source, shape)
    return {rank: len(wanted - have.get(rank, set())) for rank, wanted in need.items()}


def nbytes(x: DTensor) -> int:
    return sum(shard.nbytes for shard in x.shards.values())


def check(pair: Pair, staging: int, seed: int) -> MeshChange:
    (mesh, other), (source, target) = pair.meshes, pair.placements
    x = make_dtensor(pair.value, mesh, source, seed=seed)
    before = [shard.clone() for shard in x.shards.values()]
    union = {*coordinates(mesh), *coordinates(other)}
    wanted = DTensorSpec(other, target, contiguous_meta(pair.value.shape, pair.value.dtype))
    with using_cost_model(CostModel(staging=staging)):
        change = shardwise.plan(x, target, device_mesh=other)
        assert isinstance(change, MeshChange)
        assert str(change)
        assert change.seconds > 0 or not change.collectives
        with Traffic(group_over([union]).name, union) as traffic:
            y = x.redistribute(other, target)
        with LiveBytes() as counted:
            x.redistribute(other, target)
    assert y._spec is wanted
    assert torch.equal(assemble(y), pair.value), (pair, str(change))
    assert all(map(torch.equal, x.shards.values(), before)), "the source was written"
    check_bytes(pair, change, traffic, staging)
    limit = staging * len(union) + nbytes(y)
    if change.reduction.steps:  # the reduced tensor, and the buffers of its collectives
        limit += 3 * nbytes(x)
    assert counted.peak <= limit, (pair, str(change), counted.peak, limit)
    return change


def check_bytes(pair: Pair, change: MeshChange, traffic: Traffic, staging: int) -> None:
    """Every rank receives what it lacks, ranks with the same shard send the same, and rounds are as small as asked."""
    bound = {rank: count * pair.value.dtype.itemsize for rank, count in lacking(pair, change).items() if count}
    assert {rank: count for rank, count in traffic.received.items() if count} == bound, (pair, str(change))
    assert change.received_by == bound
    assert len(traffic.rounds) == (change.rounds if bound else 0)
    assert all(staged <= staging for by_rank in traffic.rounds for staged in by_rank.values())
    for route in change.routes:
        for part in route.parts:
            for ranks in part.have.ranks:
                sent = [route.sent.get(rank, 0) for rank in ranks]
                assert max(sent) - min(sent) <= 1, (pair, str(change))


@pytest.mark.parametrize("part", range(6))
def test_random_pairs(part: int) -> None:
    """300 pairs: the same ranks in another order and shape, overlapping, disjoint, and nested sets of ranks."""
    seen: list[Any] = []
    for seed in range(50 * part, 50 * (part + 1)):
        with simulate(RANKS):
            seen.append(check(random_pair(seed), STAGINGS[seed // 4 % len(STAGINGS)], seed))
    assert any(change.rounds > 1 for change in seen)
    assert any(change.op for change in seen)
    assert any(change.received_by for change in seen)
    if part == 1:
        assert any(change.reduction.steps for change in seen)


# ---- memory of each rank --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", range(2))
def test_no_rank_needs_more_than_source_target_and_staging(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank by rank, in a process group that moves nothing: the simulated world counts all ranks together."""
    # The backend that moves nothing refuses to receive where nothing is sent.
    monkeypatch.setattr(streaming, "all_to_all", lambda sent, sizes, *_: sent.new_empty(sum(sizes)))
    several = 0
    for seed in range(12 * part, 12 * (part + 1)):
        with simulate(RANKS):
            ranks = [*map(coordinates, random_pair(seed).meshes)]
        for rank in {**ranks[0], **ranks[1]}:
            with fake_group(RANKS, rank), using_cost_model(CostModel(staging=300)):
                pair = random_pair(seed)
                (mesh, other), (source, target) = pair.meshes, pair.placements
                x = distribute_tensor(pair.value, mesh, source, src_data_rank=None)
                x.redistribute(other, target)  # planned
                with LiveBytes() as counted:
                    y = x.redistribute(other, target)
                change = shardwise.plan(x._spec, y._spec)
                local = y.to_local().nbytes
                reduced = 3 * x.to_local().nbytes if change.source.layout.partial else 0
                assert counted.peak <= local + 300 + reduced, (seed, rank, str(change))
                several += change.rounds > 1
    assert several


# ---- what else a redistribution does --------------------------------------------------------------------------------


@pytest.fixture
def three() -> Any:
    """A line of all ranks, a square of them, and two of them."""
    with simulate(4):
        yield (
            init_device_mesh("cpu", (4,), mesh_dim_names=("a",)),
            init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y")),
            DeviceMesh("cpu", [3, 1], mesh_dim_names=("c",)),
        )


def journey(tensor: DTensor, meshes: Any) -> DTensor:
    """Multiply and add on one mesh after the other."""
    line, square, two = meshes
    on_square = (tensor * 2).redistribute(square, [Shard(1), Replicate()])
    on_two = (on_square + 1).redistribute(two, [Shard(0)])
    return (on_two * on_two).redistribute(line, [Shard(1)])


def test_ops_gradients_and_second_gradients(three: Any) -> None:
    value = torch.randn(7, 4, dtype=torch.float64)
    alone = value.clone().requires_grad_()
    expected = (alone * 2 + 1) ** 2
    x = distribute_tensor(value, three[0], [Shard(0)]).requires_grad_()
    found = journey(x, three)
    torch.testing.assert_close(assemble(found.detach()), expected.detach())
    weight = torch.randn(7, 4, dtype=torch.float64)
    (first,) = torch.autograd.grad((expected**2 * weight).sum(), alone, create_graph=True)
    w = distribute_tensor(weight, three[0], [Shard(1)])
    (ours,) = torch.autograd.grad((found**2 * w).sum(), x, create_graph=True, retain_graph=True)
    assert ours.placements == (Shard(0),)
    torch.testing.assert_close(assemble(ours.detach()), first.detach())
    (second,), (again,) = (
        torch.autograd.grad((g**2).sum(), leaf, retain_graph=True) for g, leaf in ((first, alone), (ours, x))
    )
    torch.testing.assert_close(assemble(again), second)
    (found**2 * w).sum().backward()
    torch.testing.assert_close(assemble(x.grad), first.detach())


def test_gradients_of_partial_and_disjoint_meshes() -> None:
    with simulate(4):
        first, second = DeviceMesh("cpu", [0, 2]), DeviceMesh("cpu", [1, 3])
        local = torch.randn(4, 6)
        x = DTensor.from_local(local, first, [Partial()]).requires_grad_()
        y = x.redistribute(second, [Shard(1)], backward_dtype=torch.bfloat16)
        (y * y).sum().backward()
        assert x.grad.placements == (Replicate(),)
        torch.testing.assert_close(assemble(x.grad), (4 * local).bfloat16().float())


def test_async_explicit_dtype_and_counts(three: Any) -> None:
    line, _, two = three
    value = torch.randn(6, 4)
    x = distribute_tensor(value, line, [Shard(0)])
    with shardwise.explicit(), CommDebugMode() as comm:
        y = x.redistribute(two, [Shard(1)], async_op=True, forward_dtype=torch.bfloat16)
        x.fill_(0)
    assert torch.equal(assemble(y), value.bfloat16())
    assert comm.get_comm_counts() == {torch.ops.c10d_functional.all_to_all_single: 1}
    change = shardwise.plan(x.spec.with_dtype(torch.bfloat16), y.spec)
    assert comm.get_total_bytes() == change.received > 0
    assert "over 4 ranks" in comm.generate_comm_debug_tracing_table(noise_level=0)


def test_the_plan_prints(three: Any) -> None:
    line, square, two = three
    x = distribute_tensor(torch.randn(8, 4), line, [Shard(0)])
    assert str(shardwise.plan(x, [Shard(1), Replicate()], device_mesh=square)) == (
        "f32[8@a, 4] on mesh(a=4) -> f32[8, 4@x] on mesh(x=2, y=2)   1 collective, 48 B received by a rank\n"
        "  1. exchange             over 4 ranks          48 B   f32[8, 4@x]"
    )
    assert "in 3 rounds" in str(_planned(CostModel(staging=64), x, two))
    partial = DTensor.from_local(torch.ones(1 << 12), line, [Partial()])
    assert "1. all-reduce (sum)     over a" in str(_planned(CostModel(p2p_latency=1.0), partial, two))
    assert "1. reduce-scatter (sum) over a" in str(_planned(CostModel(latency=1e-9, peer_latency=0.0), partial, two))
    assert "1. exchange (sum)" in str(_planned(CostModel(latency=1.0, p2p_latency=0.0), partial, two))
    assert shardwise.plan(x, [Shard(1)], device_mesh=line).plan.collectives == 1


def _planned(model: CostModel, x: DTensor, mesh: DeviceMesh) -> Any:
    with using_cost_model(model):
        return shardwise.plan(x, [Shard(0)], device_mesh=mesh)


def test_nothing_moves_where_every_rank_has_its_shard(three: Any) -> None:
    line, square, two = three
    x = distribute_tensor(torch.randn(8, 4), line, [Shard(0)])
    with CommDebugMode() as comm:
        y = x.redistribute(square, [Shard(0), Shard(0)])
        whole = distribute_tensor(torch.randn(8), line, [Replicate()], src_data_rank=None)
        comm._reset()
        part = whole.redistribute(two, [Shard(0)])
    assert all(y.shards[rank].data_ptr() == shard.data_ptr() for rank, shard in x.shards.items())
    assert comm.get_total_counts() == 0
    assert torch.equal(assemble(part), whole.shards[0])


def test_instances_of_submeshes_stay_apart() -> None:
    """Where each instance of the source shares its ranks with instances of the target alone."""
    with simulate(8):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        other = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tq"))
        values = RankTensor([torch.arange(12.0).view(3, 4) + 100 * (rank // 4) for rank in range(8)])
        x = make_dtensor(values, mesh["tp"], [Shard(0)], seed=0)
        y = x.redistribute(other["cp", "tq"], [Shard(1), Shard(0)])
        for instance in range(2):
            assert torch.equal(assemble(y, instance=instance), values.shards[4 * instance])
        copied = make_dtensor(values.shards[0], mesh, P("tp"), seed=0).redistribute(mesh["dp"], [Shard(1)])
        assert torch.equal(assemble(copied), values.shards[0])


def test_an_instance_that_shares_ranks_with_two_of_the_source_is_an_error() -> None:
    """Here another instance of the target shares no rank with the source, so that the sizes add up."""
    with simulate(8):
        source = DeviceMesh("cpu", [[0, 4], [1, 5]], mesh_dim_names=("i", "s"))["s"]
        target = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("j", "t"))["t"]
        x = distribute_tensor(torch.arange(8.0), source, [Shard(0)])
        with pytest.raises(MeshError, match="each instance has a tensor of its own"):
            x.redistribute(target, [Replicate()])


def test_strides_of_the_source_do_not_matter(three: Any) -> None:
    line, _, two = three
    value = torch.randn(6, 4)
    transposed = distribute_tensor(value, line, [Shard(1)]).t()
    expanded = distribute_tensor(value[:1], line, [Shard(1)]).expand(6, 4)
    assert torch.equal(assemble(transposed.redistribute(two, [Shard(0)])), value.t())
    assert torch.equal(assemble(expanded.redistribute(two, [Shard(0)])), value[:1].expand(6, 4))
    x = distribute_tensor(value, line, [Shard(1)]).requires_grad_()
    x.t().redistribute(two, [Shard(0)]).sum().backward()  # an expanded gradient goes back
    assert torch.equal(assemble(x.grad), torch.ones(6, 4))


def test_erased_and_in_graphs(three: Any) -> None:
    value = torch.randn(7, 4)
    x = distribute_tensor(value, three[0], [Shard(0)])
    expected = (value * 2 + 1) ** 2

    def step(tensor: DTensor) -> DTensor:
        return journey(tensor, three)

    erased, graph = shardwise.erase(step), make_fx(step)(x)
    compiled = torch.compile(step, backend="aot_eager")
    for scale in (1.0, 2.0):
        given = distribute_tensor(value * scale, three[0], [Shard(0)])
        expected = (value * scale * 2 + 1) ** 2
        for run in (erased, graph, compiled):
            torch.testing.assert_close(assemble(run(given)), expected)
    torch.compiler.reset()
    assert erased.explain().count("all_to_all") == 1


def test_meta_tensors(three: Any) -> None:
    line, _, two = three
    x = DTensor.from_local(torch.empty(2, 4, device="meta"), line, [Shard(0)])
    y = x.redistribute(two, [Shard(0)])
    assert y.shape == (8, 4)
    assert y.to_local().device.type == "meta"
