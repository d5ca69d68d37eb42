"""The command line, one file for each command.

A file defines `COMMAND`, and is listed in `NAMES` of main.py:

    COMMAND = Command("print what is known about an op", "shardwise rules aten.mm", add_arguments, run)
"""

from .main import main

__all__ = ["main"]
