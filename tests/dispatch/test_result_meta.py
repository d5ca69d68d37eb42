"""Shapes of results: remembered for a new size only where that is sound, and errors that reach every rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import shardwise
from shardwise import Replicate, Shard, distribute_tensor, init_device_mesh, zeros
from shardwise.dispatch.result_meta import cached_results, form_key
from shardwise.ops.registry import resolve
from shardwise.sharding.spec import contiguous_meta
from shardwise.testing import check
from tests.processes.pool import on_processes

CALLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "slice": lambda x: x[:, :6],  # the full dim at first, then a slice of it
    "pad": lambda x: F.pad(x, (0, 6 - min(6, x.shape[1]))),
    "softmax": lambda x: x.softmax(1),
    "layer norm": lambda x: F.layer_norm(x.t(), (4,)),
    "new zeros": lambda x: x.new_zeros(4, 6) + 1,
    "sum": lambda x: x.sum(1),
    "product": lambda x: x @ x.t(),
    "average": lambda x: F.adaptive_avg_pool1d(x[:, : x.shape[1] // 4 * 4].view(4, 1, -1), 1),
}


def test_a_dim_that_was_1_once_is_not_always_1() -> None:
    """The window of a pool, the half of a gate: sizes that the rule does not name."""
    pools = [(F.avg_pool2d, (torch.randn(2, 3, size, size), 4)) for size in (4, 8, 4, 12)]
    halves = [(F.glu, (torch.randn(3, size),)) for size in (2, 8, 4)]
    pairs = [(F.pdist, (torch.randn(size, 3),)) for size in (2, 5, 3)]
    for function, arguments in pools + halves + pairs:
        check(function, *arguments, meshes=((2,),))


@pytest.mark.parametrize("call", CALLS)
def test_one_size_after_the_other(call) -> None:
    for size in (6, 8, 5, 6):
        check(CALLS[call], torch.randn(4, size, dtype=torch.float64), meshes=((2,), (4,)))


def test_a_new_size_is_recalled() -> None:
    with shardwise.simulate(2):
        mesh = init_device_mesh("cpu", (2,))
        x = zeros(4, 6, device_mesh=mesh, placements=[Shard(0)])
        torch.hypot(x, x)
    metas = [contiguous_meta((32, 7), torch.float32)] * 2
    op = resolve(torch.ops.aten.hypot.default)
    cached = cached_results(op, form_key(op, metas, {}), metas)
    assert (cached.shape, cached.dtype) == ((32, 7), torch.float32)
    # Sizes of 1 broadcast, so the results of such calls are computed each time.
    assert form_key(op, [contiguous_meta((1, 7), torch.float32)], {}) is None


def test_shapes_that_a_rule_does_not_take_run_on_gathered_inputs() -> None:
    index = torch.zeros(1, dtype=torch.int64)
    check(lambda x, i: torch.gather(x, 0, i), torch.tensor(3.0), index, meshes=((2,), (2, 2)), grad=False)


def test_nothing_comes_of_nothing() -> None:
    """A sharded tensor without elements: the op would refuse the local shard, though not the global tensor."""
    with shardwise.simulate(4):
        mesh = init_device_mesh("cpu", (4,))
        empty = zeros(0, 3, 3, device_mesh=mesh, placements=[Shard(1)])
        assert F.pad(empty, (1, 1), mode="reflect").shape == (0, 3, 5)


@on_processes
def test_dtypes_that_do_not_go_together_are_refused_on_every_rank() -> None:
    """Six rows over four ranks: the last holds none and would not call the op, so it would not see the error."""
    mesh = init_device_mesh("cpu", (4,))
    x = distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)])
    weight = distribute_tensor(torch.ones(4, 4, dtype=torch.float64), mesh, [Replicate()])
    with pytest.raises(RuntimeError, match="dtype"):
        x @ weight
