"""`shardwise explain FUNCTION`: why a function of the user's program communicates."""

from __future__ import annotations

import argparse
import os
from contextlib import ExitStack

from ..debug import Explanation
from .command import Command
from .function import HELP, call_with_mesh, load_function
from .mesh import add_device_argument, add_mesh_argument, simulated_mesh
from .progress import Progress

_EXAMPLES = """
shardwise explain train:step --mesh dp=2,tp=4     step(mesh) on 8 simulated ranks
shardwise explain train.py:step                   step(), which makes its own world
shardwise explain train:step --mesh tp=4 --trace step.json
torchrun --nproc-per-node 4 -m shardwise explain train:step
"""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("function", help=HELP)
    add_mesh_argument(
        parser,
        required=False,
        help="simulate a mesh with these axes, such as dp=2,tp=4, and call the function with it",
    )
    add_device_argument(parser)
    parser.add_argument("--trace", metavar="PATH", help="also write a trace for chrome://tracing and ui.perfetto.dev")


def _run(given: argparse.Namespace) -> int:
    function = load_function(given.function)
    explanation = Explanation()
    with ExitStack() as stack:
        stack.enter_context(Progress(f"running {given.function}"))
        mesh = stack.enter_context(simulated_mesh(given.mesh, given.device)) if given.mesh is not None else None
        with explanation:
            function() if mesh is None else call_with_mesh(function, mesh)
        if given.trace is not None:
            explanation.trace(given.trace)
    if os.environ.get("RANK", "0") == "0":  # under torchrun, all ranks would print the same
        print(explanation.to_json() if given.json else explanation)
    return 0


COMMAND = Command("explain why a function of your program communicates", _EXAMPLES, _add_arguments, _run)
