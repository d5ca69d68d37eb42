"""The verifier: a sample of all rules passes it, and rules that are wrong on purpose do not."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import shardwise
from shardwise.comm.groups import adopt
from shardwise.ops.registry import registry
from shardwise.testing import verify as verifier
from shardwise.testing.calls import Failure, try_call
from shardwise.testing.checker import Sample
from shardwise.testing.probe import probe
from shardwise.testing.recording import recorded
from shardwise.testing.verify.__main__ import QUICK_ENTRIES, main
from tests.ops.helpers import r


@pytest.fixture
def rules() -> Iterator[Any]:
    """What a test registers is gone afterwards."""
    with registry.restored():
        yield registry


def test_quick(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick"]) == 0, capsys.readouterr().out
    said = capsys.readouterr().out
    assert f"{QUICK_ENTRIES} entries, " in said
    assert "0 entries with failures" in said


SAMPLES = {
    "nll_loss": Sample(F.nll_loss, (r(6, 4), torch.tensor([1, 0, 3, 3, 2, 0]), r(4).abs()), {}, grad=False),
    "relu": Sample(torch.relu, (r(5, 4),), {}),
    "softmax": Sample(torch.softmax, (r(5, 4), 1), {}),
    "mm": Sample(torch.mm, (r(5, 4), r(4, 3)), {}),
    "cumsum": Sample(torch.cumsum, (r(5, 4), 0), {}),
    "amax": Sample(torch.amax, (r(5, 4), 0), {}),
    "sign": Sample(torch.sign, (r(5, 4),), {}, grad=False),
    "fmax": Sample(torch.fmax, (r(5, 4), r(5, 4, seed=1)), {}, grad=False),
    "add": Sample(torch.add, (r(5, 4), r(5, 4, seed=1)), {}, grad=False),
    "neg": Sample(torch.neg, (r(5, 4),), {}, grad=False),
}
WRONG = {
    "a mean as an average of means": ("nll_loss", "aten::nll_loss_forward", "n [c], n, [c] -> , ; reduce avg"),
    "relu as linear": ("relu", "aten::relu", "b.. -> b.. ; linear 0"),
    "softmax of parts": ("softmax", "aten::_softmax", "x.. -> x.."),
    "a product that forgets to sum": ("mm", "aten::mm", "m k, k n -> m n ; linear 0+1"),
    "a running sum that starts anew": ("cumsum", "aten::cumsum", "x.. -> x.. ; linear 0"),
    "a maximum that adds": ("amax", "aten::amax", "a b -> b ; linear 0"),
    "NaN has no sign": ("sign", "aten::sign", "b.. -> b.. ; monotone 0"),
    "fmax drops NaN": ("fmax", "aten::fmax", "b.., b.. -> b.. ; monotone 0 | 1 ; reduce max"),
    "infinities cancel": ("add", "aten::add", "b.., b.. -> b.. ; linear 0+1 ; monotone 0"),
    "the least integer has no opposite": ("neg", "aten::neg", "b.. -> b.. ; linear 0 ; antitone 0"),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_right_rules_pass(name: str, rules: Any) -> None:
    report = verifier.verify_samples(name, [SAMPLES[name]])
    assert report.status == "ok", report.failures
    assert report.cases


@pytest.mark.parametrize("case", WRONG)
def test_wrong_rules_are_caught(case: str, rules: Any) -> None:
    name, key, rule = WRONG[case]
    for other in [other for other in registry if other.startswith(f"{key}.")]:
        registry.register(other, rule)
    registry.register(key, rule)
    report = verifier.verify_samples(name, [SAMPLES[name]])
    assert report.status == "wrong", report


def test_a_crash_is_a_failure_of_its_entry() -> None:
    class Crashing(verifier.Child):
        def line(self, seconds: float) -> str:
            assert self.process
            self.process.kill()
            self.process.wait()
            return super().line(seconds)

    child = Crashing(verifier.QUICK, 0)
    report = child.ask("abs")
    assert (report.entry, report.status) == ("abs", "crash")


def test_every_placement_that_a_rule_allows_is_tried() -> None:
    """m, k and n sharded, sums and averages in either operand; k = 2 * 2 sharded inside the dim, in two ways.

    And, with hostile floats and integers, sums in either operand.
    """
    calls = recorded(torch.mm, (r(5, 4), r(4, 3)), {}, grad=False)
    product = next(call for call in calls or () if call.func is torch.ops.aten.mm.default)
    assert try_call(product, (3,)) == (13, [])


def test_a_rule_that_could_allow_more(rules: Any) -> None:
    registry.register("aten::mm", "[m] k, k [n] -> [m] [n] ; linear 0 | 1")
    calls = recorded(torch.mm, (r(5, 4), r(4, 6)), {}, grad=False)
    product = next(call for call in calls or () if call.func is torch.ops.aten.mm.default)
    with shardwise.simulate(2):
        found = probe(product, adopt(init_device_mesh("cpu", (2,))))
    assert [(hint.key, hint.factor, hint.found) for hint in found] == [
        ("aten::mm", "m", "concat 0"),
        ("aten::mm", "n", "concat 1"),
    ]


def test_no_hint_where_there_is_nothing_to_gain(rules: Any) -> None:
    calls = recorded(torch.softmax, (r(5, 6), 1), {}, grad=False)
    with shardwise.simulate(2):
        mesh_info = adopt(init_device_mesh("cpu", (2,)))
        assert [hint for call in calls or () for hint in probe(call, mesh_info)] == []


def test_reports_travel_as_json() -> None:
    report = verifier.Report("x", failures=[Failure("wrong", "op", "where", "text")])
    assert Failure(*json.loads(json.dumps(report.failures))[0]) == report.failures[0]
    assert "wrong  x: op where" in verifier.summary([report], by_rule=False)
