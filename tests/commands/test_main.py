"""The command line: help, exit codes, one command after another."""

import json
import subprocess
import sys

import pytest

from shardwise.commands.main import NAMES, main


def test_rules_are_printed(capsys):
    assert main(["rules", "aten.mm"]) == 0
    assert "m k, k n -> m n" in capsys.readouterr().out


def test_rules_as_json(capsys):
    assert main(["rules", "aten.mm", "--json"]) == 0
    assert "m k, k n -> m n" in json.loads(capsys.readouterr().out)["text"]


def test_an_unknown_op_is_wrong_usage(capsys):
    assert main(["rules", "aten.no_such_op"]) == 2
    assert "no_such_op" in capsys.readouterr().err


@pytest.mark.parametrize("name", NAMES)
def test_help_shows_examples(name, capsys):
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert f"shardwise {name} " in capsys.readouterr().out.split("examples:")[1]


def test_the_module_runs_as_a_program():
    done = subprocess.run([sys.executable, "-m", "shardwise", "--help"], capture_output=True, text=True, check=True)
    assert all(name in done.stdout for name in NAMES)
