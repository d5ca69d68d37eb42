"""`shardwise report MODULE:FUNCTION -o PAGE`: one page about a step."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

from torch import nn

from ..comm.plan import bytes_text, seconds_text
from ..debug.reporting.report import Report, report, report_of
from ..debug.reporting.step import run_step
from ..sharding.mesh import DeviceMesh
from .command import Command
from .function import HELP, call_with_mesh, load_function
from .mesh import add_mesh_argument
from .program_mesh import program_mesh
from .progress import Progress

_EXAMPLES = """
shardwise report train:step --mesh dp=2,tp=4 -o step.html
shardwise report path/to/train.py:build_model --mesh tp=8
shardwise report train:main --json
torchrun --nproc-per-node 4 -m shardwise report train:step --mesh dp=2,tp=2
"""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("function", help=f"{HELP}; it runs a step, or returns a model or a function that runs a step")
    text = "a mesh of simulated ranks, or of torchrun's, for the function; without it the function makes its own world"
    add_mesh_argument(parser, required=False, help=text)
    parser.add_argument(
        "-o", "--output", metavar="PAGE", help="the file to write (default: report.html; none with --json)"
    )
    parser.add_argument("--title", help="the title of the page (default: the name of the function)")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if there are warnings; notes do not count")


def _run(given: argparse.Namespace) -> int:
    function = load_function(given.function)
    title = given.title or given.function.rpartition(":")[2]
    with Progress(f"running {given.function}") as progress, program_mesh(given.mesh) as mesh:
        found = _report(function, mesh, title)
        progress("writing the page")
        page = given.output or (None if given.json else "report.html")
        first = os.environ.get("RANK", "0") == "0"
        if page is not None and first:
            found.write(page)
        text = found.to_json() if given.json else _text(found, page)
    if first:
        print(text)
    return int(given.strict and any(warning.severity != "note" for warning in found.warnings))


def _report(function: Callable[..., object], mesh: DeviceMesh | None, title: str) -> Report:
    """Return the report of the function; if it returns a model or a step, the report of that."""
    step = run_step(call_with_mesh, (function, mesh), {})
    if isinstance(step.result, nn.Module) or callable(step.result):
        return report(step.result, title=title)
    return report_of(step, title)


def _text(found: Report, page: str | None) -> str:
    total = found.total
    time = f", {seconds_text(total.seconds)} modelled" if total.count else ""
    count = f"{total.count} collective{'' if total.count == 1 else 's'}"
    lines = [f"{page}: {count}, {bytes_text(total.bytes)} received by a rank{time}"]
    lines += [f"{warning.severity}: {warning.title}" for warning in found.warnings]
    return "\n".join(lines)


COMMAND = Command(
    "write one page about how a model is sharded and what a step communicates", _EXAMPLES, _add_arguments, _run
)
