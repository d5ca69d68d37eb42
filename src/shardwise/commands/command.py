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
    """Runs the command, prints, and returns the exit code: 0, or 1 if it found something wrong. Raises a UsageError for
    wrong arguments. `given.json` is True to print JSON instead of text; main() adds that option to every command."""


class UsageError(Exception):
    """Wrong arguments. main() prints the message and returns 2."""
