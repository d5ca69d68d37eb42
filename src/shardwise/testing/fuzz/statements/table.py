"""The table of statements: functions that write one line of a program, with how often each is drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..draw import Draw

Writer = Callable[[Draw], str]


class Entry(NamedTuple):
    """A function that returns an expression (whose value becomes a variable) or, if `bare`, a line."""

    write: Writer
    weight: float
    bare: bool


TABLE: list[Entry] = []


def expression(weight: float = 1.0) -> Callable[[Writer], Writer]:
    """Add a function that returns an expression."""
    return _add(weight, bare=False)


def line(weight: float = 1.0) -> Callable[[Writer], Writer]:
    """Add a function that returns a line."""
    return _add(weight, bare=True)


def words(text: str) -> tuple[str, ...]:
    """Return the words of a text, for long lists of names."""
    return tuple(text.split())


def _add(weight: float, bare: bool) -> Callable[[Writer], Writer]:
    def add(write: Writer) -> Writer:
        TABLE.append(Entry(write, weight, bare))
        return write

    return add
