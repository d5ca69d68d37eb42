"""Parse the command line and run one command."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from ..errors import ShardwiseError
from .command import Command, UsageError

NAMES = ("verify", "explain", "report", "plan", "draw", "rules", "doctor")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    given = _parser().parse_args(arguments)
    try:
        return _command(given.command).run(given)
    except (UsageError, ShardwiseError) as error:
        print(f"shardwise {given.command}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="shardwise", description="Inspect and check programs on distributed tensors.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in NAMES:
        command = _command(name)
        one = commands.add_parser(
            name,
            help=command.summary,
            description=command.summary[0].upper() + command.summary[1:] + ".",
            epilog=f"examples:\n{_indented(command.examples)}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(one)
        one.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _command(name: str) -> Command:
    return importlib.import_module(f".{name}", __package__).COMMAND


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.strip().splitlines())
