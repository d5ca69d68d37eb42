"""`shardwise verify FUNCTION`: a program on simulated ranks, compared with one device."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from ..verifying import Report, verify
from .command import Command, UsageError
from .function import HELP, load_function
from .mesh import add_mesh_argument, parse_mesh
from .progress import Progress

_EXAMPLES = """
shardwise verify train:check             check() returns the arguments of shardwise.verify as a dict, or a report
shardwise verify train.py:check --json
shardwise verify train:check --mesh dp=4,tp=2 --steps 1
"""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("function", help=HELP)
    add_mesh_argument(
        parser, required=False, help="a mesh in place of the one that the function returns, such as dp=2,tp=4"
    )
    parser.add_argument("--steps", type=int, help="a number of steps in place of the one that the function returns")


def _run(given: argparse.Namespace) -> int:
    function = load_function(given.function)
    with Progress(f"running {given.function}") as progress:
        returned = function()
        if isinstance(returned, Mapping):
            returned = verify(**{"progress": progress, **returned, **_changed(given)})
        elif given.mesh or given.steps:
            raise UsageError(
                f"{given.function} returned a {type(returned).__name__}: "
                "let it return the arguments of shardwise.verify as a dict to use --mesh and --steps"
            )
    if not isinstance(returned, Report):
        raise UsageError(
            f"{given.function} returned a {type(returned).__name__}: "
            "return a dict of the arguments of shardwise.verify, or its report"
        )
    print(returned.to_json() if given.json else returned)
    return 0 if returned.ok else 1


def _changed(given: argparse.Namespace) -> dict[str, object]:
    """Return the arguments of `verify` that the command line overrides."""
    changed: dict[str, object] = {}
    if given.steps:
        changed["steps"] = given.steps
    if given.mesh:
        sizes = parse_mesh(given.mesh)
        changed |= {"mesh": tuple(sizes.values()), "names": tuple(sizes)}
    return changed


COMMAND = Command("compare a program on simulated ranks with one device", _EXAMPLES, _add_arguments, _run)
