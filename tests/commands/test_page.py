"""What docs/report.md shows of the command line is what it prints."""

import shlex
from pathlib import Path

import pytest

from shardwise.commands.main import NAMES, main

PAGE = (Path(__file__).parents[2] / "docs" / "report.md").read_text()
CALLS = PAGE.partition("```console\n")[2].partition("\n```")[0].split("\n\n")


@pytest.mark.parametrize("call", CALLS)
def test_calls(call, capsys):
    command, _, wanted = call.partition("\n")
    assert main(shlex.split(command.removeprefix("$ shardwise "))) == 0
    assert capsys.readouterr().out.rstrip("\n") == wanted


@pytest.mark.parametrize("name", NAMES)
def test_every_command_is_there(name):
    assert f"| `{name}" in PAGE
