"""`shardwise report`: functions that build, that return a step, that run one."""

import json
from pathlib import Path

import pytest

from shardwise.commands.main import main

PROGRAM = str(Path(__file__).parent / "program_for_report.py")
MESH = ["--mesh", "dp=2,tp=2"]


def written(capsys, name, *options):
    assert main(["report", f"{PROGRAM}:{name}", *options, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_page_is_written(tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main(["report", f"{PROGRAM}:returns_a_step", *MESH, "-o", str(page), "--title", "A step"]) == 0
    assert "<h1><span>A step</span></h1>" in page.read_text()
    out = capsys.readouterr().out
    assert out.startswith(f"{page}: ")
    assert "collective" in out


def test_what_a_function_returns_is_reported(capsys):
    model = written(capsys, "build", *MESH)
    assert model["total"]["count"] == 0
    assert [each["name"] for each in model["tensors"]] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    step = written(capsys, "returns_a_step", *MESH)
    assert step["total"]["count"] > 0
    assert {each["cause"] for each in step["communications"]}.isdisjoint(
        {"distribute"}
    )  # the building is not part of it


def test_a_function_that_runs_the_step_itself(capsys):
    data = written(capsys, "runs", *MESH)
    assert {each["phase"] for each in data["communications"]} == {"forward", "backward"}
    assert len(data["tensors"]) == 4


def test_a_function_with_a_world_of_its_own(capsys):
    data = written(capsys, "own_world")
    assert data["total"]["count"] > 0
    assert len(data["tensors"]) == 4
    assert data["memory"].keys() == {"0", "1"}


def test_modules_are_imported_by_name(capsys):
    assert main(["report", "tests.commands.program_for_report:build", *MESH, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "build"


def test_strict_counts_warnings(capsys):
    assert main(["report", f"{PROGRAM}:partial", *MESH, "--json"]) == 0
    assert main(["report", f"{PROGRAM}:partial", *MESH, "--json", "--strict"]) == 1
    assert main(["report", f"{PROGRAM}:build", *MESH, "--json", "--strict"]) == 0
    capsys.readouterr()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("no_colon", "names no function"),
        ("no.such.module:step", "there is no module no.such.module"),
        ("no/such/file.py:step", "there is no file"),
        (f"{PROGRAM}:no_such", "has no 'no_such'"),
        (f"{PROGRAM}:not_a_function", ", not a function"),
        (f"{PROGRAM}:needs_more", "needs 2 arguments"),
    ],
)
def test_wrong_usage(function, message, capsys):
    assert main(["report", function, *MESH]) == 2
    assert message in capsys.readouterr().err


def test_a_mesh_that_is_missing(capsys):
    assert main(["report", f"{PROGRAM}:build"]) == 2
    assert "add --mesh" in capsys.readouterr().err


def test_the_example_is_reported(tmp_path, capsys):
    example = Path(__file__).parents[2] / "examples" / "inspected.py"
    page = tmp_path / "step.html"
    assert main(["report", f"{example}:one_step", "--mesh", "dp=2,tp=2", "-o", str(page)]) == 0
    assert "collectives" in capsys.readouterr().out
    assert "GPT.blocks.*.down" in page.read_text()
