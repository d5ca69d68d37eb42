"""Ops without a rule: a warning that says what to do about it, or an error where one was asked for."""

import re
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import shardwise
from shardwise import Replicate, Shard
from shardwise.dispatch.fallback import GatherWarning
from shardwise.errors import CommunicationError
from shardwise.ops.registry import registry
from shardwise.testing import assemble
from tests.ops.helpers import on, r, ranks


@torch.library.custom_op("shardwise_tests::no_rule", mutates_args=())
def no_rule(x: Tensor) -> Tensor:
    return x + 1


@no_rule.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


OP = torch.ops.shardwise_tests.no_rule.default
X = r(5, 4)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Nobody has been warned, and what a test registers is gone afterwards."""
    registry.resolve(OP).warned = False
    with registry.restored():
        yield


def test_it_runs_on_gathered_inputs_and_says_so_once() -> None:
    with ranks(2) as mesh:
        x = on(mesh, X, Shard(0))
        with pytest.warns(GatherWarning) as said:
            result = [no_rule(x), no_rule(x)][0]
        assert [str(warning.message) for warning in said] == [
            "shardwise_tests.no_rule.default has no rule: it runs on gathered inputs, the same on every rank; "
            'give it a rule: shardwise.register_sharding(torch.ops.shardwise_tests.no_rule.default, "..."); '
            "shardwise.testing.discover(torch.ops.shardwise_tests.no_rule.default, [(...)]) finds one from sample "
            "arguments"
        ]
        assert result.placements == (Replicate(),)
        torch.testing.assert_close(assemble(result), X + 1)


def test_the_line_it_names_works() -> None:
    with ranks(2) as mesh:
        x = on(mesh, X, Shard(0))
        with pytest.warns(GatherWarning) as said:
            no_rule(x)
        line = re.search(r"shardwise\.register_sharding\(.*?\)", str(said[0].message))
        assert line
        exec(line[0].replace("...", "x.. -> x.."), {"shardwise": shardwise, "torch": torch})
        with warnings.catch_warnings(), shardwise.explicit():
            warnings.simplefilter("error")
            assert no_rule(x).placements == (Shard(0),)


def test_strict_ops() -> None:
    with ranks(2) as mesh:
        x = on(mesh, X, Shard(0))
        with shardwise.strict_ops():
            with pytest.raises(CommunicationError) as caught:
                no_rule(x)
            assert str(caught.value) == (
                "shardwise_tests.no_rule.default of f32[5@a, 4] has no rule, and strict_ops is on: give it a rule: "
                'shardwise.register_sharding(torch.ops.shardwise_tests.no_rule.default, "..."); '
                "shardwise.testing.discover(torch.ops.shardwise_tests.no_rule.default, [(...)]) finds one from sample "
                "arguments"
            )
            x + 1  # has one
            torch.nn.functional.linear(x, on(mesh, r(3, 4)))  # is made of ops that have one
        with pytest.warns(GatherWarning):
            no_rule(x)
