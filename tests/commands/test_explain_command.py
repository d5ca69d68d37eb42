"""`shardwise explain module:function`."""

import json

import pytest

from shardwise.commands.main import main

PROGRAM = """
import torch
import shardwise
from shardwise import Shard, distribute_tensor, init_device_mesh

def product(mesh):
    x = distribute_tensor(torch.ones(8, 16), mesh, [Shard(0)], src_data_rank=None)
    w = distribute_tensor(torch.ones(16, 12), mesh, [Shard(1)], src_data_rank=None)
    return x @ w

def own_world():
    with shardwise.simulate(2):
        product(init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))

number = 3
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    (tmp_path / "program_to_explain.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_function_of_a_mesh(program, capsys):
    assert main(["explain", "program_to_explain:product", "--mesh", "tp=4", "--trace", "trace.json"]) == 0
    out = capsys.readouterr().out
    assert "all-gather over tp   384 B" in out
    assert "program_to_explain.py:9   return x @ w" in out
    assert json.loads((program / "trace.json").read_text())["traceEvents"]


def test_a_function_with_its_own_world_as_json(program, capsys):
    assert main(["explain", "program_to_explain.py:own_world", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["communications"][0]["op"] == "aten.mm"


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("program_to_explain", "names no function"),
        ("program_to_explain:nothing", "has no 'nothing'"),
        ("program_to_explain:number", "is a int, not a function"),
        ("no_such_program:f", "there is no module no_such_program"),
        ("no_such_program.py:f", "there is no file no_such_program.py"),
    ],
)
def test_wrong_usage(program, capsys, given, problem):
    assert main(["explain", given]) == 2
    assert problem in capsys.readouterr().err
