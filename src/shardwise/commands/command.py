"""The class of commands; each file in this folder defines one."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple


class Command(NamedTuple):
    """One command of the command line."""

    summary: str
    """One line for the list of commands, such as "print what is known about an op"."""
    examples: str
    """Lines that a user can copy, printed by --help."""
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    """Does the work, prints, and returns the exit code: 0 fine, 1 found something wrong. Wrong usage is a UsageError.
    `given.json` says whether to print JSON instead of text; main() adds that option to every command."""


class UsageError(Exception):
    """The arguments are wrong: main() prints the message and returns 2."""
