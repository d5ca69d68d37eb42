"""Discovery: the rule of an op from split inputs, and the false rules that it must not find."""

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise
from shardwise.ops.registry import registry
from shardwise.testing import check, discover
from shardwise.testing.probe_call import ProbeCall
from shardwise.testing.recording import Recorded
from shardwise.testing.split_dims import SplitDims, factors_of
from tests.ops.helpers import r

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def rules() -> Iterator[None]:
    """What a test registers is gone afterwards."""
    with registry.restored():
        yield


def found(op: Any, *args: Any, **kwargs: Any) -> set[tuple[Any, ...]]:
    """The splits of one call, in this process: dims, and the ways to the results."""
    splits = factors_of(ProbeCall(Recorded(op, args, kwargs))) or []
    return {(split.dims, *split.ways) for split in splits}


# ---- ways to put results together -----------------------------------------------------------------------------------

ROW, COLUMN = ((0, 0),), ((0, 1),)
WAYS: dict[str, tuple[Callable[[], set[Any]], set[Any]]] = {
    "matrix product": (
        lambda: found(aten.mm.default, r(3, 4), r(4, 2)),
        {(ROW, ("concat", 0)), (((0, 1), (1, 0)), ("sum", 0)), (((1, 1),), ("concat", 1))},
    ),
    "of equal sizes": (
        lambda: found(aten.mm.default, r(4, 4), r(4, 4)),
        {(ROW, ("concat", 0)), (((0, 1), (1, 0)), ("sum", 0)), (((1, 1),), ("concat", 1))},
    ),
    "maximum": (lambda: found(aten.amax.default, r(3, 2), [0]), {(ROW, ("max", 0)), (COLUMN, ("concat", 0))}),
    "a minimum and a maximum": (lambda: found(aten.aminmax.default, r(5)), {(ROW, ("min", 0), ("max", 0))}),
    "a sum, and what is the same": (
        lambda: found(aten.histogram.bins_tensor, r(12), torch.tensor([-3.0, 0.0, 3.0])),
        {(ROW, ("sum", 0), ("same", 0))},
    ),
    "lists": (lambda: found(aten.cat.default, [r(3, 4), r(3, 4)], 0), {(COLUMN, ("concat", 1))}),
    "lists of results": (lambda: found(aten.unbind.int, r(3, 4), 0), {(COLUMN, ("concat", 0))}),
    "what broadcasts": (
        lambda: found(aten.add.Tensor, r(3, 1), r(3, 4)),
        {(((0, 0), (1, 0)), ("concat", 0)), (((1, 1),), ("concat", 1))},
    ),
    # Of these a naive probe believes too much: see `shardwise.testing.split_dims`.
    "averages": (lambda: found(aten.mean.default, r(4, 4)), set()),
    "all of some that are false": (
        lambda: found(aten.all.default, r(3, 4) > 0),
        {(ROW, ("min", 0)), (COLUMN, ("min", 0))},
    ),
    "any of some that are true": (
        lambda: found(aten.any.default, r(3, 4) > 0),
        {(ROW, ("max", 0)), (COLUMN, ("max", 0))},
    ),
    "products": (lambda: found(aten.prod.default, r(5) / 1e3), set()),
    "fills lower than all data": (
        lambda: found(aten.index_fill.int_Scalar, r(3, 4), 0, torch.tensor([1, 2]), -100.0),
        {(COLUMN, ("concat", 1))},
    ),
    "positions": (lambda: found(aten.argmax.default, r(4, 3), 0), {(COLUMN, ("concat", 0))}),
    "what depends on data": (lambda: found(aten.nonzero.default, r(4, 3)), set()),
    "dims of size 1 and 2": (lambda: found(aten.cumsum.default, r(1, 2), 1), {(ROW, ("concat", 0))}),
}


@pytest.mark.parametrize("case", WAYS)
def test_ways(case: str) -> None:
    run, wanted = WAYS[case]
    assert run() == wanted


def test_arguments_that_hold_sizes() -> None:
    splits = factors_of(ProbeCall(Recorded(aten.view.default, (r(3, 4, 5), [3, 20]), {})))
    assert splits == [SplitDims(((0, 0),), (("concat", 0),), (("size", 0),))]


def test_no_results_no_evidence() -> None:
    assert factors_of(ProbeCall(Recorded(aten.relu.default, (r(0, 3),), {}))) is None


# ---- lines ----------------------------------------------------------------------------------------------------------


def test_one_line_for_many_ranks() -> None:
    samples = [(r(4, 3),), (r(2, 4, 3),)]
    assert str(discover(aten.linalg_qr.default, samples)) == "mode='reduced' : x.. _ _ -> x.. _ _, x.. _ _"


def test_ranks_that_were_not_tried_are_not_spoken_of() -> None:
    assert str(discover(aten.mm.default, [(r(3, 4), r(4, 2))])) == "a b, b c -> a c"


def test_what_is_not_varied_is_a_condition() -> None:
    tests = torch.tensor([0.5, 1.0], dtype=torch.float64)
    samples = [((r(3), tests), {"invert": invert}) for invert in (False, True)]
    assert str(discover(aten.isin.Tensor_Tensor, samples)).splitlines() == [
        "assume_unique=False invert=False : a, b -> a ; reduce max",
        "assume_unique=False invert=True : a, b -> a ; reduce min",
    ]


# ---- ops of one's own -----------------------------------------------------------------------------------------------


@torch.library.custom_op("shardwise_tests::tops", mutates_args=())
def tops(x: Tensor, weight: Tensor | None = None, *, keep: bool = False) -> tuple[Tensor, Tensor]:
    y = x if weight is None else x * weight
    return y.amax(0, keepdim=keep), y.sum(1)


@tops.register_fake
def _(x: Tensor, weight: Tensor | None = None, *, keep: bool = False) -> tuple[Tensor, Tensor]:
    return x.new_empty((1, x.shape[1]) if keep else x.shape[1:]), x.new_empty(x.shape[0])


@torch.library.custom_op("shardwise_tests::stops", mutates_args=())
def stops(x: Tensor, how: str) -> Tensor:
    if x.shape[0] != 4:
        os.abort() if how == "crash" else time.sleep(60)
    return x * 2


@stops.register_fake
def _(x: Tensor, how: str) -> Tensor:
    return torch.empty_like(x)


def test_optional_operands_keywords_and_two_results_register_as_they_are() -> None:
    x, weight = r(5, 4), r(4)
    samples = [((x, w), {"keep": keep}) for w in (weight, None) for keep in (False, True)]
    rule = discover(torch.ops.shardwise_tests.tops.default, samples)
    assert str(rule) == "a b, b -> _.. b, a ; reduce max, sum"
    shardwise.register_sharding(rule.op, rule)
    check(tops, x, weight, grad=False, meshes=[(3,), (4,)], limit=12)  # with empty shards, too


def test_passing_is_tried_not_guessed() -> None:
    assert str(discover(aten.relu.default, [(r(4, 3),)], passing="linear 0")) == "no rule: it is not linear 0"
    assert str(discover(aten.relu.default, [(r(4),)], passing="monotone 0")) == "a -> a ; monotone 0"
    assert str(discover(aten.add.Tensor, [(r(4), r(4))], passing="linear 0 | 1")) == "no rule: it is not linear 0"


def test_crashes_and_hangs_stay_in_the_child() -> None:
    op = torch.ops.shardwise_tests.stops.default
    assert str(discover(op, [(r(4), "crash")])) == "no rule: crash"
    assert str(discover(op, [(r(4), "hang")], seconds=1)) == "no rule: slow"


def test_no_samples() -> None:
    with pytest.raises(
        shardwise.errors.InputError,
        match=r"no samples of aten\.relu\.default: pass at least one call",
    ):
        discover(aten.relu.default, [])
