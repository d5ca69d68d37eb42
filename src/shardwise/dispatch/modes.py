"""Modes: whether an op may communicate, may run without a rule, and may take plain tensors as replicated.

>>> with explicit():
...     y = x @ w          # an error if this needs communication; the message holds the redistribute that allows it
>>> with implicit_replication():
...     y = x + plain      # the plain tensor is taken as replicated
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from ..ops.modes import modes as modes
from ..ops.modes import switched
from .formulas import mark_held_result


def explicit(enabled: bool = True) -> AbstractContextManager[None]:
    """Inside, an op that needs communication is an error; only `redistribute` and its like communicate."""
    return switched(explicit="raise" if enabled else "off")


def warning_of_communication() -> AbstractContextManager[None]:
    """Inside, an op that needs communication warns, with the text of the error that `explicit` raises."""
    return switched(explicit="warn")


@contextmanager
def implicit_replication() -> Iterator[None]:
    """Inside, plain tensors that meet distributed ones are taken as replicated: the same on all ranks."""
    with switched(implicit_replication=True):
        try:
            yield
        finally:
            mark_held_result()


def strict_ops() -> AbstractContextManager[None]:
    """Inside, an op without a rule is an error instead of running on gathered inputs."""
    return switched(strict_ops=True)
