"""Collectives that are alike, as one: the same line, module, collective and reason."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from ..explaining.records import Communication, Total


class Folded(NamedTuple):
    """Collectives that are alike: the first of them, how much they communicate together, and their modules."""

    first: Communication
    total: Total
    numbers: tuple[int, ...]
    module: str
    """The path of the module; with stars for numbers if there are several."""


def fold(communications: Sequence[Communication]) -> list[Folded]:
    """Return the collectives without repetitions, in the order in which they began.

    Those of numbered modules are alike, as the layers of a model are.
    """
    groups: dict[tuple[object, ...], list[Communication]] = {}
    for each in communications:
        what = (each.phase, each.kind, each.group, each.cause, each.op, each.operand, each.before, each.after)
        groups.setdefault((each.line, starred(each.module), *what, starred(each.reason)), []).append(each)
    return [_folded(group) for group in groups.values()]


def starred(path: str) -> str:
    """Return a path, or a text with paths, with stars for the numbers of modules: `blocks.*.up`."""
    return re.sub(r"(?<=\.)\d+(?=\.|\b)", "*", path)


def _folded(group: Sequence[Communication]) -> Folded:
    modules = {each.module for each in group}
    module = group[0].module if len(modules) == 1 else starred(group[0].module)
    return Folded(group[0], Total.of(group), tuple(each.number for each in group), module)
