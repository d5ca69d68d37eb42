"""`shardwise plan` and `shardwise draw`."""

import json

import pytest

from shardwise.commands.main import main


def test_a_plan_is_printed_with_moves_bytes_and_seconds(capsys):
    assert main(["plan", "f32[8@dp,16]", "f32[8,16@tp]", "--mesh", "dp=2,tp=4", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "f32[8@dp, 16] -> f32[8, 16@tp]",
        "  1.  exchange  over dp  64 B  522 µs  f32[8, 16@tp]",
        "1 collective, 64 B received by a rank, 522 µs by the cost model of cpu",
    ]


def test_a_plan_as_json(capsys):
    assert main(["plan", "f32[64,16] sum(tp)", "f32[64@tp,16]", "--mesh", "dp=2,tp=4", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    (step,) = data["steps"]
    assert (step["kind"], step["axes"], step["received_bytes"]) == ("reduce-scatter", ["tp"], 64 * 16 * 3)
    assert data["seconds"] == pytest.approx(step["seconds"])
    assert data["mesh"] == {"dp": 2, "tp": 4}


def test_a_step_that_is_not_needed(capsys):
    assert main(["plan", "f32[8]", "f32[8]", "--mesh", "tp=2"]) == 0
    assert "0 collectives, 0 B" in capsys.readouterr().out


def test_accelerators_have_other_costs(capsys):
    assert main(["plan", "f32[8@tp]", "f32[8]", "--mesh", "tp=2", "--device", "cuda"]) == 0
    assert "by the cost model of cuda" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["f32[8@dq]", "f32[8]", "--mesh", "dp=2"], "no axis dq"),
        (["f32[8]", "f32[9]", "--mesh", "dp=2"], "different tensors"),
        (["f32[8]", "f32[8]", "--mesh", "dp"], "'dp' is not an axis"),
        (["f32[8]", "f32[8]", "--mesh", "dp=2,dp=3"], "axis dp is given twice"),
    ],
)
def test_wrong_usage(arguments, message, capsys):
    assert main(["plan", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_drawn_tensor(capsys):
    assert main(["draw", "f32[4@dp, 6@tp]", "--mesh", "dp=2,tp=2"]) == 0
    assert "0:2 │  0  │  1  │" in capsys.readouterr().out
    assert main(["draw", "f32[4@dp, 6@tp]", "--mesh", "dp=2,tp=2", "--json"]) == 0
    shards = json.loads(capsys.readouterr().out)["shards"]
    assert shards[3] == {"ranks": [3], "index": [[[2, 4]], [[3, 6]]], "shape": [2, 3]}
