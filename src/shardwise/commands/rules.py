"""`shardwise rules OP`: what is known about an op."""

from __future__ import annotations

import argparse
import json

from ..rules import explain
from .command import Command


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", help="the name of an op, such as aten.mm, aten::mm or aten.mm.default")


def _run(given: argparse.Namespace) -> int:
    text = explain(given.op)
    print(json.dumps({"op": given.op, "text": text}) if given.json else text)
    return 0


COMMAND = Command("print what is known about an op", "shardwise rules aten.mm", _add_arguments, _run)
