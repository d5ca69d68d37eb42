"""Modes: whether an op may communicate, may run without a rule, and may take plain tensors as replicated.

>>> with explicit():
...     y = x @ w          # an error if this needs communication; the message holds the redistribute that allows it
>>> with implicit_replication():
...     y = x + plain      # the plain tensor is taken as replicated
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from ..ops.modes import current
from ..ops.modes import modes as modes
from .formulas import mark_held_result


@contextmanager
def _switched(**switches: bool) -> Iterator[None]:
    before = current.get()
    current.set(before._replace(**switches))
    try:
        yield
    finally:
        current.set(before)


def explicit(enabled: bool = True) -> AbstractContextManager[None]:
    """Inside, an op that needs communication is an error; only `redistribute` and its like communicate."""
    return _switched(explicit=enabled)


@contextmanager
def implicit_replication() -> Iterator[None]:
    """Inside, plain tensors that meet distributed ones are taken as replicated: the same on all ranks."""
    with _switched(implicit_replication=True):
        try:
            yield
        finally:
            mark_held_result()


def strict_ops() -> AbstractContextManager[None]:
    """Inside, an op without a rule is an error instead of running on gathered inputs."""
    return _switched(strict_ops=True)
