"""`shardwise verify`: exit codes, JSON, wrong usage."""

import json

import pytest

from shardwise.commands.main import main

PROGRAM = """
import torch
from torch import nn
import shardwise

def build():
    return nn.Linear(4, 4)

def right(model, mesh):
    shardwise.distribute_module(model, mesh)

def wrong(model, mesh):
    right(model, mesh)
    model.register_forward_hook(lambda _, __, output: output * mesh["tp"].size())

def arguments(apply):
    x = torch.randn(4, 4)
    return dict(build_model=build, apply=apply, batch=x, loss=lambda y: y.square().mean(), place=shardwise.P("dp"),
                mesh=(2, 2), names=("dp", "tp"), steps=1)

def good():
    return arguments(right)

def bad():
    return arguments(wrong)

def report():
    return shardwise.verify(**good())

def number():
    return 7
"""


@pytest.fixture
def program(tmp_path):
    name = f"verified_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(PROGRAM)
    return str(tmp_path / f"{name}.py")


def test_a_right_program(program, capsys):
    assert main(["verify", f"{program}:good"]) == 0
    assert capsys.readouterr().out.startswith("ok: compared")


def test_a_wrong_program(program, capsys):
    assert main(["verify", f"{program}:bad"]) == 1
    said = capsys.readouterr().out
    assert "is tp times too large (2 is the size of tp)" in said
    assert "with tp=1" in said


def test_json(program, capsys):
    assert main(["verify", f"{program}:bad", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["first"]) == (False, "output")
    assert found["differences"][0]["how"] == "is tp times too large (2 is the size of tp)"


def test_a_report_and_another_mesh(program, capsys):
    assert main(["verify", f"{program}:report"]) == 0
    assert main(["verify", f"{program}:bad", "--mesh", "dp=4,tp=1"]) == 0
    assert "mesh(dp=4, tp=1)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{}:missing"], "has no 'missing'"),
        (["{}:number"], "returned a int"),
        (["{}"], "names no function"),
        (["no_such_module_at_all:check"], "no module no_such_module_at_all"),
        (["{}:good", "--mesh", "dp"], "write --mesh dp=2,tp=4"),
        (["{}:report", "--steps", "1"], "to use --mesh and --steps"),
    ],
)
def test_wrong_usage(program, arguments, said, capsys):
    assert main(["verify", *(argument.format(program) for argument in arguments)]) == 2
    assert said in capsys.readouterr().err
