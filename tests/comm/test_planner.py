"""The planner, which is arithmetic on layouts: no world, no tensors."""

import heapq
import itertools
import math
import random

import pytest
import torch

from shardwise import InterleavedShard, Partial, Replicate, Shard, ShardOrderEntry
from shardwise.comm.cost import Links, Rates
from shardwise.comm.edges import Task, edges_from
from shardwise.comm.plan import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    EXCHANGE,
    REDUCE_SCATTER,
    SLICE,
    TO_PARTIAL,
    bytes_text,
)
from shardwise.comm.planner import _seconds, make_plan
from shardwise.comm.states import common_slots
from shardwise.errors import CommunicationError, LayoutError
from shardwise.sharding.from_placements import default_order, from_placements

CUTS = [Shard(0), Shard(1), Replicate()]
SUMS = [*CUTS, Partial()]
MIXED = [*SUMS, Partial("max"), Partial("avg"), Partial("product")]


def links(*bandwidth, latency=20e-6):
    return Links.uniform(latency, 0.5e-6, 1e-12, tuple(bandwidth))


def layout_of(mesh, shape, placements, order=None):
    return from_placements(mesh, shape, placements, default_order(placements) if order is None else order)


def layouts(mesh, choices, shape=(8, 8)):
    return [layout_of(mesh, shape, placements) for placements in itertools.product(choices, repeat=len(mesh))]


def plan_between(source, target, groups=None, bandwidth=None):
    return make_plan(source, target, 4, links(*(bandwidth or (1e9,) * len(source.mesh_sizes))), groups)


def check_chain(plan):
    """Every step starts where the one before it ended, and says what it does."""
    here = plan.source
    for step in plan.steps:
        assert step.before is here
        assert step.after is not here
        assert bool(step.axes) == (step.kind not in (SLICE, TO_PARTIAL))
        assert (step.op != "") == (step.kind in (ALL_REDUCE, REDUCE_SCATTER, TO_PARTIAL))
        assert (step.received > 0) == bool(step.axes)
        here = step.after
    assert here is plan.target


def kinds(plan):
    return [(step.kind, step.axes) for step in plan.steps]


@pytest.mark.parametrize(
    ("mesh", "choices"),
    [((2,), MIXED), ((3,), MIXED), ((2, 2), MIXED), ((2, 4), SUMS), ((2, 2, 2), CUTS)],
    ids=["2", "3", "2x2", "2x4", "2x2x2"],
)
def test_steps_chain_and_memory_stays_bounded(mesh, choices):
    # (8, 8) divides evenly on all but the mesh of 3, so that the modelled memory is the true one.
    for source, target in itertools.product(layouts(mesh, choices), repeat=2):
        plan = plan_between(source, target)
        check_chain(plan)
        bound = max(source.max_local_numel(), target.max_local_numel())
        assert all(step.after.max_local_numel() <= bound for step in plan.steps)
        assert (plan.steps == ()) == (source is target)


def test_steps_chain_for_three_axes_with_sums():
    # 64 x 64 pairs, of which every 5th.
    for source, target in itertools.islice(itertools.product(layouts((2, 2, 2), SUMS), repeat=2), 0, None, 5):
        check_chain(plan_between(source, target))


def test_steps_chain_for_uneven_and_empty_sizes():
    for shape in [(7, 3), (1, 2), (0, 4), (1, 1)]:
        for source, target in itertools.product(layouts((2, 3), SUMS, shape), repeat=2):
            here = source
            for step in plan_between(source, target).steps:
                assert step.before is here
                here = step.after
            assert here is target


@pytest.mark.parametrize("mesh", [(2, 2), (2, 4)], ids=str)
def test_cuts_receive_no_more_than_a_rank_lacks(mesh):
    # Between Shard and Replicate one exchange at most is needed, and no byte is received twice.
    for source, target in itertools.product(layouts(mesh, CUTS), repeat=2):
        lacks = 0
        for at in itertools.product(*map(range, mesh)):
            have = [{i for run in runs for i in range(*run)} for runs in source.runs(at)]
            want = [{i for run in runs for i in range(*run)} for runs in target.runs(at)]
            shared = math.prod(len(one & other) for one, other in zip(have, want, strict=True))
            lacks = max(lacks, math.prod(map(len, want)) - shared)
        assert plan_between(source, target).received == pytest.approx(4 * lacks)


@pytest.mark.parametrize("choices", [CUTS, SUMS], ids=["cuts", "sums"])
def test_single_axis_groups_still_reach(choices):
    # A submesh whose root was never adopted has one group for each axis and no others.
    groups = frozenset({(0,), (1,), (2,)})
    pairs = list(itertools.product(layouts((2, 2, 2), choices), repeat=2))
    for source, target in pairs if choices is CUTS else pairs[::7]:
        plan = plan_between(source, target, groups)
        check_chain(plan)
        assert all(len(step.axes) <= 1 for step in plan.steps)


def test_single_axis_groups_reorder_axes():
    # (0, 1) -> (1, 0) is one exchange over both axes; with single axes it takes a detour.
    groups = frozenset({(0,), (1,)})
    source = layout_of((2, 2), (8, 8), [Shard(0), Shard(0)])
    target = layout_of((2, 2), (8, 8), [Shard(0), Shard(0)], (ShardOrderEntry(0, (1, 0)),))
    assert kinds(plan_between(source, target)) == [(EXCHANGE, (0, 1))]
    detour = plan_between(source, target, groups)
    check_chain(detour)
    assert detour.collectives > 1
    assert all(len(step.axes) == 1 for step in detour.steps if step.axes)


def test_no_group_at_all_is_no_worse_than_one_axis():
    # The set of groups names sets of axes; a single axis always has its own.
    source, target = layout_of((4,), (8,), [Shard(0)]), layout_of((4,), (8,), [Replicate()])
    assert kinds(plan_between(source, target, frozenset())) == [(ALL_GATHER, (0,))]


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ([Shard(0)], [Replicate()], [(ALL_GATHER, (0,))]),
        ([Replicate()], [Shard(0)], [(SLICE, ())]),
        ([Shard(0)], [Shard(1)], [(ALL_TO_ALL, (0,))]),
        ([Partial()], [Replicate()], [(ALL_REDUCE, (0,))]),
        ([Partial()], [Shard(1)], [(REDUCE_SCATTER, (0,))]),
        ([Replicate()], [Partial()], [(TO_PARTIAL, ())]),
        ([Shard(0)], [Partial("max")], [(TO_PARTIAL, ())]),
        # Nobody needs the whole sum: a rank reduces its part, and adds identities around it.
        ([Partial()], [Partial("max")], [(REDUCE_SCATTER, (0,)), (TO_PARTIAL, ())]),
    ],
)
def test_one_axis(source, target, expected):
    mesh = (4,)
    assert kinds(plan_between(layout_of(mesh, (8, 8), source), layout_of(mesh, (8, 8), target))) == expected


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        # Axes that can go together go in one collective on the flattened group.
        ([Shard(0), Shard(0)], [Replicate(), Replicate()], [(ALL_GATHER, (0, 1))]),
        ([Shard(0), Shard(1)], [Replicate(), Replicate()], [(ALL_GATHER, (0, 1))]),
        ([Partial(), Partial()], [Replicate(), Replicate()], [(ALL_REDUCE, (0, 1))]),
        ([Partial(), Partial()], [Shard(0), Shard(0)], [(REDUCE_SCATTER, (0, 1))]),
        ([Shard(0), Shard(0)], [Shard(1), Shard(1)], [(ALL_TO_ALL, (0, 1))]),
        # Shrink first, grow last.
        ([Shard(0), Replicate()], [Replicate(), Shard(0)], [(EXCHANGE, (0,))]),
        ([Partial(), Replicate()], [Replicate(), Shard(0)], [(SLICE, ()), (ALL_REDUCE, (0,))]),
    ],
)
def test_two_axes(source, target, expected):
    mesh = (2, 2)
    assert kinds(plan_between(layout_of(mesh, (8, 8), source), layout_of(mesh, (8, 8), target))) == expected


def test_inner_reductions_come_first_where_the_order_matters():
    # max over a of the sums over b is not the sum over b of the maxima over a.
    target = layout_of((2, 2), (8, 8), [Replicate(), Replicate()])
    for outer, inner in [("max", "sum"), ("sum", "max"), ("product", "sum"), ("max", "min")]:
        plan = plan_between(layout_of((2, 2), (8, 8), [Partial(outer), Partial(inner)]), target)
        reductions = [(step.axes, step.op) for step in plan.steps if step.op]
        assert reductions == [((1,), inner), ((0,), outer)]


def test_a_partial_axis_that_stays_is_not_reduced():
    source, target = [Partial(), Shard(0)], [Partial(), Replicate()]
    plan = plan_between(layout_of((2, 2), (8, 8), source), layout_of((2, 2), (8, 8), target))
    assert kinds(plan) == [(ALL_GATHER, (1,))]
    # But where the ops do not commute, everything is reduced before a Partial axis is added outside another.
    source, target = [Replicate(), Partial("max")], [Partial("sum"), Partial("max")]
    plan = plan_between(layout_of((2, 2), (8, 8), source), layout_of((2, 2), (8, 8), target))
    assert plan.steps[0].kind in (ALL_REDUCE, REDUCE_SCATTER)


class TestUnequalLinks:
    """A slow axis and a fast one: bytes are moved where they are cheap."""

    BIG = (4096, 4096)

    def plan(self, source, target, slow=1e9, fast=200e9):
        mesh = (4, 8)  # axis 0 is slow
        return plan_between(
            layout_of(mesh, self.BIG, source), layout_of(mesh, self.BIG, target), bandwidth=(slow, fast)
        )

    def test_all_reduce_over_both(self):
        plan = self.plan([Partial(), Partial()], [Replicate(), Replicate()])
        assert kinds(plan) == [(REDUCE_SCATTER, (1,)), (ALL_REDUCE, (0,)), (ALL_GATHER, (1,))]

    def test_all_reduce_over_the_slow_axis_alone(self):
        # The fast axis holds copies: each of its ranks carries a slice over the slow links.
        plan = self.plan([Partial(), Replicate()], [Replicate(), Replicate()])
        assert kinds(plan) == [(SLICE, ()), (ALL_REDUCE, (0,)), (ALL_GATHER, (1,))]

    def test_equal_links_take_no_detour(self):
        plan = self.plan([Partial(), Replicate()], [Replicate(), Replicate()], 1e9, 1e9)
        assert kinds(plan) == [(ALL_REDUCE, (0,))]

    def test_small_tensors_take_no_detour(self):
        mesh = (4, 8)
        source, target = ([Partial(), Replicate()], [Replicate(), Replicate()])
        plan = plan_between(layout_of(mesh, (8, 8), source), layout_of(mesh, (8, 8), target), bandwidth=(1e9, 200e9))
        assert kinds(plan) == [(ALL_REDUCE, (0,))]

    def test_memory_stays_bounded_on_detours(self):
        choices = list(itertools.product(SUMS, repeat=2))
        for source, target in itertools.product(choices, repeat=2):
            plan = self.plan(source, target)
            check_chain(plan)
            bound = max(plan.source.max_local_numel(), plan.target.max_local_numel())
            assert all(step.after.max_local_numel() <= bound for step in plan.steps)


class TestInterleaved:
    def test_common_blocks_are_refined(self):
        # 2 blocks of 4 rows, cut in 2: both cuts are known over (2 4), so only one slot moves.
        source, target = (layout_of((2,), (8,), [p]) for p in (InterleavedShard(0, 2), Shard(0)))
        plan = plan_between(source, target)
        check_chain(plan)
        assert plan.collectives == 1
        assert plan.received == 8  # half of the 4 rows a rank holds

    def test_unrefinable_cuts_go_through_an_exchange(self):
        # Thirds of 12 rows and thirds of 2 blocks of 6 have no boundaries in common.
        source, target = (layout_of((3,), (12,), [p]) for p in (InterleavedShard(0, 2), Shard(0)))
        assert common_slots(source, target) is None
        plan = plan_between(source, target)
        check_chain(plan)
        assert kinds(plan) == [(EXCHANGE, (0,))]

    def test_unrefinable_with_partial_on_both_ends(self):
        source = layout_of((3, 2), (12, 4), [InterleavedShard(0, 2), Partial()])
        target = layout_of((3, 2), (12, 4), [Shard(0), Partial("max")])
        plan = plan_between(source, target)
        check_chain(plan)
        assert [step.kind for step in plan.steps] == [ALL_REDUCE, EXCHANGE, TO_PARTIAL]

    def test_unrefinable_without_a_common_group(self):
        groups = frozenset({(0,), (1,)})
        source = layout_of((3, 2), (12, 4), [InterleavedShard(0, 2), Shard(1)])
        target = layout_of((3, 2), (12, 4), [Shard(0), Replicate()])
        plan = plan_between(source, target, groups)
        check_chain(plan)
        assert all(len(step.axes) <= 1 for step in plan.steps)

    def test_random_pairs_chain(self):
        choices = [*SUMS, InterleavedShard(0, 2), InterleavedShard(0, 3), InterleavedShard(1, 2)]
        generator = random.Random(0)
        checked = 0
        while checked < 300:
            mesh = generator.choice([(2,), (3,), (2, 2), (2, 3), (2, 2, 2)])
            source, target = ([generator.choice(choices) for _ in mesh] for _ in range(2))
            try:
                ends = [layout_of(mesh, (12, 8), placements) for placements in (source, target)]
            except LayoutError:
                continue
            plan = plan_between(*ends)
            here = plan.source
            for step in plan.steps:
                assert step.before is here
                here = step.after
            assert here is plan.target
            checked += 1


def dijkstra(source, target, link, groups=None):
    """The cost of the cheapest path, by a search without any estimate or early cut-off."""
    slots = common_slots(source, target)
    task = Task(source.mesh_sizes, slots.source, slots.target, link.bandwidth, groups)
    nbytes = 4 * math.prod(source.shape)
    queue, done, count = [(0.0, 0, task.source)], set(), itertools.count(1)
    while queue:
        cost, _, state = heapq.heappop(queue)
        if state == task.target:
            return cost
        if state in done:
            continue
        done.add(state)
        for edge in edges_from(task, state, task.capacity):
            if edge.after not in done:
                step = _seconds(link, task.mesh_sizes, edge.kind, edge.axes, edge.fraction * nbytes)
                heapq.heappush(queue, (cost + step, next(count), edge.after))
    return None


@pytest.mark.parametrize("mesh", [(4,), (2, 4), (2, 2, 2)], ids=str)
def test_the_estimate_never_misses_the_cheapest_plan(mesh):
    # Small and large tensors, equal and unequal links: latency or bytes decide, with or without detours.
    generator = random.Random(str(mesh))
    choices = [*SUMS, Partial("max")]
    for _ in range(100):
        size = generator.choice([8, 1024])
        link = links(*(generator.choice([1e9, 25e9, 200e9]) for _ in mesh))
        if generator.random() < 0.5:  # point-to-point traffic that is slower, or faster, than native collectives
            latency = tuple(generator.choice([1e-6, 20e-6, 200e-6]) for _ in mesh)
            p2p = Rates(latency, 0.1e-6, tuple(rate * generator.choice([0.1, 1.0, 4.0]) for rate in link.bandwidth))
            link = Links(link.ring, p2p, link.pack)
        source, target = (layout_of(mesh, (size, 8), [generator.choice(choices) for _ in mesh]) for _ in range(2))
        # Where one collective will do the search stops, so the packing of an exchange may be spent in vain.
        assert make_plan(source, target, 4, link).seconds == pytest.approx(dijkstra(source, target, link), rel=1e-3)


def test_text():
    mesh, names = (2, 4), ("dp", "tp")
    source = layout_of(mesh, (4096, 4096), [Partial(), Shard(0)])
    target = layout_of(mesh, (4096, 4096), [Shard(1), Replicate()])
    assert plan_between(source, target).text(torch.float32, names).splitlines() == [
        "f32[4096@tp, 4096] sum(dp) -> f32[4096, 4096@dp]   2 collectives, 32 MiB received by a rank",
        "  1. reduce-scatter (sum) over dp              8 MiB   f32[4096@tp, 4096@dp]",
        "  2. all-gather           over tp             24 MiB   f32[4096, 4096@dp]",
    ]
    nothing = plan_between(source, source).text(torch.float32, names)
    assert nothing == "f32[4096@tp, 4096] sum(dp) -> f32[4096@tp, 4096] sum(dp)   0 collectives, 0 B received by a rank"
    local = plan_between(layout_of(mesh, (8, 8), [Replicate(), Replicate()]), layout_of(mesh, (8, 8), [Shard(0)] * 2))
    assert "1. slice                locally                0 B   f32[8@dp, 8]" in local.text(torch.float32, names)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (3 << 40, "3072 GiB")]
)
def test_bytes_text(count, text):
    assert bytes_text(count) == text


def test_refuses_other_shapes_and_meshes():
    here = layout_of((2,), (8, 8), [Shard(0)])
    for other in (layout_of((2,), (8, 9), [Shard(0)]), layout_of((4,), (8, 8), [Shard(0)])):
        with pytest.raises(CommunicationError, match="no plan"):
            plan_between(here, other)
