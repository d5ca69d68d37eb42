"""The command line, one file for each command.

A file defines `COMMAND`, and its name stands in `NAMES` below:

    COMMAND = Command("print what is known about an op", "shardwise rules aten.mm", add_arguments, run)
"""

from .main import main

__all__ = ["main"]
