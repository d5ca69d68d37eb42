"""How ops treat what the user did not write: hidden communication, and plain tensors among distributed ones.

>>> with explicit():
...     y = x @ w          # an error if this needs communication; the message holds the redistribute that allows it
>>> with implicit_replication():
...     y = x + plain      # the plain tensor is taken as replicated
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Modes:
    """The switches. One set for the process: autograd runs backward ops in threads of its own."""

    explicit = False
    implicit_replication = False
    strict_ops = False


modes = Modes()


@contextmanager
def explicit(enabled: bool = True) -> Iterator[None]:
    """Inside, an op that needs communication is an error; `redistribute` says where communication is wanted."""
    before, modes.explicit = modes.explicit, enabled
    try:
        yield
    finally:
        modes.explicit = before


@contextmanager
def implicit_replication() -> Iterator[None]:
    """Inside, plain tensors that meet distributed ones are taken as replicated: the same on all ranks."""
    before, modes.implicit_replication = modes.implicit_replication, True
    try:
        yield
    finally:
        modes.implicit_replication = before


@contextmanager
def strict_ops() -> Iterator[None]:
    """Inside, an op without a rule is an error instead of being run whole on gathered inputs."""
    before, modes.strict_ops = modes.strict_ops, True
    try:
        yield
    finally:
        modes.strict_ops = before
