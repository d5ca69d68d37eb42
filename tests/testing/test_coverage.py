"""The coverage script: a part of the operator database passes it, and what is wrong on purpose does not."""

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise._torch.testing import operator_database
from shardwise.ops.registry import registry
from shardwise.testing.checker import Answer
from shardwise.testing.coverage import distribution, table
from shardwise.testing.coverage.__main__ import FEWER, chosen, main
from shardwise.testing.coverage.entry import Effort, Outcome, cover
from shardwise.testing.coverage.samples import MESHES, PLAIN, Sweep, choices, samples
from shardwise.testing.coverage.sides import Processes, Simulated
from tests.processes.pool import on_processes

QUICK = Effort(samples=2, placements=4, most=2)
SOME = chosen(None, 40, seed=1)
HARD = (
    "cat",  # of tensors that are empty
    "combinations",  # makes a mask of its own
    "copysign",  # gradients that are zeros by formula
    "fft.irfftn",  # writes to a view of its gradient
    "linalg.solve",  # of nothing
    "masked_select",  # as many results as the data say
    "nn.functional.embedding_bag",
    "nonzero",
    "repeat_interleave",
    "resize_",
    "tensor_split",  # at places that a tensor says
    "unique",
)


@pytest.fixture
def rules() -> Iterator[Any]:
    """What a test registers is gone afterwards."""
    with registry.restored():
        yield registry


@pytest.mark.parametrize("name", dict.fromkeys([*SOME, *HARD]))
def test_entries(name: str) -> None:
    outcome = cover(name, QUICK, Simulated())
    assert outcome.status in ("ok", "none"), outcome.failures


SWEPT = [
    ("add", Sweep("int64")),
    ("addbmm", Sweep("int64")),  # fractions of integers
    ("nn.functional.avg_pool1d", Sweep("int64")),  # averages that are rounded
    ("topk", Sweep("int64")),  # of equal numbers
    ("logical_or", Sweep("bool")),
    ("mm", Sweep("complex64")),
    ("softmax", Sweep("bfloat16")),
    ("sum", Sweep("float16", "strided")),
    ("mul", Sweep("", "inplace")),
    ("squeeze:multiple", Sweep("", "inplace")),
    ("clamp", Sweep("", "out")),
    ("kron", Sweep("", "out")),
    ("linalg.slogdet", Sweep("", "out")),
    ("native_batch_norm", Sweep("", "out")),
    ("addmm", Sweep("", "strided")),
    ("nn.functional.rms_norm", Sweep("", "strided")),  # row-major, whatever its input
    ("nn.functional.conv2d", Sweep("", "channels_last")),
    ("mul", Sweep("", "expanded")),
]


@pytest.mark.parametrize(("name", "sweep"), SWEPT, ids=lambda value: value if isinstance(value, str) else None)
def test_variants(name: str, sweep: Sweep) -> None:
    outcome = cover(name, FEWER, Simulated(), sweep=sweep)
    assert (outcome.status, outcome.failures) == ("ok", [])


@on_processes
def test_on_processes() -> None:
    for name in ("addmm", "cumsum", "sort", "masked_select", "combinations", "nn.functional.layer_norm"):
        outcome = cover(name, FEWER, Processes())
        assert outcome.status == "ok", outcome.failures


class TestWhatIsWrong:
    def test_a_wrong_rule(self, rules: Any) -> None:
        rules.register("aten::relu", "b.. -> b.. ; linear 0")
        outcome = cover("nn.functional.relu", Effort(), Simulated())
        assert outcome.status == "wrong"
        assert "instead of" in outcome.failures[0]

    def test_an_op_that_fails(self, rules: Any) -> None:
        def refuse(call: Any) -> str:
            raise RuntimeError("no")

        rules.register("aten::relu", refuse)
        outcome = cover("nn.functional.relu", Effort(), Simulated())
        assert outcome.status == "error"
        assert "RuntimeError: no" in outcome.failures[0]

    def test_another_distribution(self) -> None:
        def drawn(mean: float, seed: int = 0) -> list[Answer]:
            generator = torch.Generator().manual_seed(seed)
            return [Answer([torch.randn(40, generator=generator) + mean], [], []) for _ in range(6)]

        def again(number: int) -> Answer:
            return drawn(0.0, seed=number + 1)[0]

        assert distribution.same_distribution(drawn(0.0), drawn(0.0, seed=1), lambda value: value, again)
        assert not distribution.same_distribution(drawn(0.0), drawn(0.7), lambda value: value, again)

    def test_numbers_that_hang_together(self) -> None:
        """Of one coin in each call many pairs of calls differ by more than many coins would."""

        def drawn(seed: int) -> Answer:
            generator = torch.Generator().manual_seed(seed)
            return Answer([torch.rand(1, generator=generator).round().expand(50)], [], [])

        plain, distributed = [drawn(seed) for seed in range(6)], [drawn(seed) for seed in range(6, 12)]
        assert distribution.same_distribution(
            plain, distributed, lambda value: value, lambda number: drawn(number + 20)
        )

    def test_the_exit_code(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        assert main(["--only", "=abs,=arange"]) == 0
        said = capsys.readouterr().out
        assert "1 all correct" in said
        assert "1 not applicable" in said
        monkeypatch.setattr("shardwise.testing.coverage.__main__.cover", lambda name, *rest: Outcome(name, "wrong"))
        assert main(["--only", "=abs"]) == 1


class TestChoices:
    def test_three_samples_of_every_entry(self) -> None:
        for name in ("abs", "dot", "addmm", "nn.functional.conv2d"):
            assert len(samples(name, PLAIN, 3, 0)) == 3

    def test_the_same_every_time(self) -> None:
        one, other = (samples("addmm", PLAIN, 3, 5) for _ in range(2))
        for a, b in zip(one, other, strict=True):
            assert all(map(torch.equal, a.tensors, b.tensors))
            assert choices(a, MESHES[1], 3, 5, 0) == choices(b, MESHES[1], 3, 5, 0)

    def test_six_placements(self) -> None:
        sample = samples("addmm", PLAIN, 1, 0)[0]
        found = [choice for mesh in MESHES for choice in choices(sample, mesh, 3, 0, 0)]
        assert len(set(found)) == 6
        assert {len(choice) for choice in found} == {3}


class TestTable:
    def test_a_row(self) -> None:
        outcome = Outcome(
            "mm", "ok", 3, 18, served={"aten.mm.default": "rule"}, rule="`m k, k n -> m n`", local=["S0 R"]
        )
        text = table.document([outcome, Outcome("arange", "none")], {"mm": "wrong", "arange": "none"}, 3, 6)
        assert "| mm | rule | `m k, k n -> m n` | S0 R | ok | wrong |" in text
        assert "| all correct | 1 | 0 |" in text
        assert "| silently wrong | 0 | 1 |" in text
        assert "arange" not in text

    def test_the_worst_op_counts(self) -> None:
        outcome = Outcome("x", served={"aten.mm.default": "rule", "aten.eig.default": "gathered"})
        assert outcome.kind == "gathered"
        assert replace(outcome, served={}).kind == "rule"

    def test_outcomes_travel_as_json(self) -> None:
        outcome = Outcome("x", "wrong", failures=["a"])
        assert Outcome(**json.loads(json.dumps(asdict(outcome)))) == outcome

    def test_the_document_is_that_of_a_run_without_failures(self) -> None:
        text = (Path(__file__).parents[2] / table.DOCUMENT).read_text()
        assert "| silently wrong | 0 |" in text
        assert "| with errors | 0 |" in text
        if torch.__version__.startswith("2.13"):
            rows = [line for line in text.splitlines() if line.startswith("| ") and line.count(" | ") >= 5]
            assert len(rows) > 0.9 * len(operator_database())
