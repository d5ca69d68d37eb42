"""Modes: whether an op may communicate, may run without a rule, and may take plain tensors as replicated.

>>> with explicit():
...     y = x @ w          # an error if this needs communication; the message holds the redistribute that allows it
>>> with implicit_replication():
...     y = x + plain      # the plain tensor is taken as replicated
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

from .._torch.tls import ThreadValue
from .formulas import mark_held_result


class _Switches(NamedTuple):
    explicit: bool = False
    implicit_replication: bool = False
    strict_ops: bool = False


_current = ThreadValue("modes", _Switches())


class Modes:
    """The modes of this thread. Backward passes have the modes of the thread that starts them, on any device."""

    @property
    def explicit(self) -> bool:
        """Whether an op that needs communication is an error."""
        return _current.get().explicit

    @property
    def implicit_replication(self) -> bool:
        """Whether plain tensors are taken as replicated."""
        return _current.get().implicit_replication

    @property
    def strict_ops(self) -> bool:
        """Whether an op without a rule is an error."""
        return _current.get().strict_ops


modes = Modes()


@contextmanager
def _switched(**switches: bool) -> Iterator[None]:
    before = _current.get()
    _current.set(before._replace(**switches))
    try:
        yield
    finally:
        _current.set(before)


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
