"""Joins collectives that are alike: with the same line, module, collective and reason."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from ..explaining.records import Communication, Total

_PATH = re.compile(r"[A-Za-z_]\w*(?:\.\w+)+")


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


def starred(text: str) -> str:
    """Return a text with stars for the numbers of layers in the paths of modules.

    >>> starred("MLP.layers.3.1"), starred("GPT.blocks.0")      # the last number may be a position in a layer
    ('MLP.layers.*.1', 'GPT.blocks.*')
    """
    return _PATH.sub(lambda path: _starred_path(path[0].split(".")), text)


def _starred_path(parts: list[str]) -> str:
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    layers = {place for place in numbers if place == numbers[0] or place < len(parts) - 1}
    return ".".join("*" if place in layers else part for place, part in enumerate(parts))


def _folded(group: Sequence[Communication]) -> Folded:
    modules = {each.module for each in group}
    module = group[0].module if len(modules) == 1 else starred(group[0].module)
    return Folded(group[0], Total.of(group), tuple(each.number for each in group), module)
