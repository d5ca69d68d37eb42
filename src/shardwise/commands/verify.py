"""`shardwise verify MODULE:FUNCTION`: a program on simulated ranks, compared with one device."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from collections.abc import Callable, Mapping

from ..verifying import Report, verify
from .command import Command, UsageError

_EXAMPLES = """\
shardwise verify train:check             the function returns the arguments of shardwise.verify as a dict, or a report
shardwise verify train:check --json      for programs
shardwise verify train:check --mesh dp=4,tp=2 --steps 1"""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("function", metavar="MODULE:FUNCTION", help="such as train:check, or path/to/train.py:check")
    parser.add_argument("--mesh", metavar="AXES", help="another mesh, such as dp=2,tp=4")
    parser.add_argument("--steps", type=int, help="another number of steps")


def _run(given: argparse.Namespace) -> int:
    returned = _function(given.function)()
    if isinstance(returned, Mapping):
        returned = verify(**{"progress": _progress(), **returned, **_changed(given)})
    elif given.mesh or given.steps:
        raise UsageError(f"{given.function} returned a report: let it return the arguments to use --mesh and --steps")
    if not isinstance(returned, Report):
        raise UsageError(
            f"{given.function} returned a {type(returned).__name__}: "
            "return a dict of the arguments of shardwise.verify, or its report"
        )
    print(returned.to_json() if given.json else returned)
    return 0 if returned.ok else 1


def _function(text: str) -> Callable[[], object]:
    module_name, colon, name = text.rpartition(":")
    if not colon or not module_name or not name:
        raise UsageError(f"{text!r} names no function: write MODULE:FUNCTION, such as train:check")
    folder, file = os.path.split(module_name)
    sys.path.insert(0, os.path.abspath(folder))  # as Python does with the folder of a program
    module_name = file.removesuffix(".py")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise
        raise UsageError(
            f"there is no module {module_name!r} in {os.path.abspath(folder)}, nor is it installed"
        ) from None
    function = getattr(module, name, None)
    if not callable(function):
        raise UsageError(f"module {module_name!r} has no function {name!r}")
    return function


def _changed(given: argparse.Namespace) -> dict[str, object]:
    """Return the arguments that the command line replaces."""
    changed: dict[str, object] = {}
    if given.steps:
        changed["steps"] = given.steps
    if given.mesh:
        try:
            pairs = [part.split("=") for part in given.mesh.split(",")]
            changed["mesh"] = tuple(int(size) for _, size in pairs)
            changed["names"] = tuple(name.strip() for name, _ in pairs)
        except ValueError:
            raise UsageError(f"--mesh {given.mesh!r}: write axes as name=size, such as dp=2,tp=4") from None
    return changed


def _progress() -> Callable[[str], None]:
    """Return a function that prints what is going on, once a second has passed."""
    start = time.monotonic()

    def say(text: str) -> None:
        if time.monotonic() - start > 1:
            print(f"verify: {text} ({time.monotonic() - start:.0f} s)", file=sys.stderr, flush=True)

    return say


COMMAND = Command("compare a program on simulated ranks with one device", _EXAMPLES, _add_arguments, _run)
