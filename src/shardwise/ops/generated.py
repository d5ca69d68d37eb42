"""Rules found by probing: the table in generated.txt, for ops without a handwritten rule.

    aten::ormqr.default : b.. [m] [n], b.. [k], b.. [p] [q] -> b.. [p] [q]
    aten::hash_tensor.default ranks=2 dim=[0] : [a] b -> b

Left of the colon are the op and the calls that the line is for: the ranks of its operands (`-` for a missing one) and
arguments by name. The first line that fits a call gives its rule; a call that no line fits runs on gathered inputs. The
file is read when the first op without a rule is called, a line is parsed when its op is called.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib import resources
from typing import Any, NamedTuple

from .call import Call, is_list
from .op import Op
from .registry import Registry

FILE = "generated.txt"
_SAME = re.compile(r"reduce [^;]*\bsame\b")


class Line(NamedTuple):
    """A rule of an op for some of its calls; `ranks` is empty if the line fits operands of any ranks."""

    op: str
    ranks: tuple[str, ...]
    arguments: tuple[tuple[str, object], ...]
    rule: str

    def __str__(self) -> str:
        ranks = [f"ranks={','.join(self.ranks)}"] if self.ranks else []
        arguments = [f"{name}={_compact(value)}" for name, value in self.arguments]
        return f"{' '.join([self.op, *ranks, *arguments])} : {self.rule}"

    def fits(self, call: Call) -> bool:
        """Return whether this line is for a call."""
        if self.ranks and self.ranks != ranks_of(call.tensors):
            return False
        return all(as_literal(call.arg(name, None)) == value for name, value in self.arguments)


def _compact(value: object) -> str:
    return repr(value).replace(" ", "")


def as_literal(value: object) -> object:
    """Return an argument as it is compared and written, with lists for all sequences."""
    return [as_literal(element) for element in value] if isinstance(value, (list, tuple)) else value


def ranks_of(tensors: Iterable[object]) -> tuple[str, ...]:
    """Return the ranks of operands as the table writes them: `-` for none, in braces the ranks of a list's elements.

    >>> ranks_of([torch.empty(2, 3), None, [torch.empty(4)]])
    ('2', '-', '{1}')
    """
    return tuple(_rank(tensor) for tensor in tensors)


def _rank(value: Any) -> str:
    if value is None or isinstance(value, (int, float, complex)):
        return "-"
    if is_list(value):
        return f"{{{'/'.join(sorted({_rank(element) for element in value}))}}}"
    return str(len(value.shape))


def read_line(text: str) -> Line:
    """Parse a line of the table."""
    left, _, rule = text.partition(" : ")
    op, *conditions = left.split()
    ranks: tuple[str, ...] = ()
    arguments = []
    for condition in conditions:
        name, _, value = condition.partition("=")
        if name == "ranks":
            ranks = tuple(value.split(","))
        else:
            arguments.append((name, ast.literal_eval(value)))
    return Line(op, ranks, tuple(arguments), rule.strip())


def read(text: str) -> dict[str, list[str]]:
    """Return the lines of a table by op, not yet parsed."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            found.setdefault(line.split(maxsplit=1)[0], []).append(line)
    return found


class Source:
    """The rule of one op's calls: the first of its lines that fits."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts
        self._lines: list[Line] | None = None

    @property
    def lines(self) -> list[Line]:
        """The lines, parsed."""
        if self._lines is None:
            self._lines = [read_line(text) for text in self.texts]
        return self._lines

    def __call__(self, call: Call) -> str | None:
        return next((line.rule for line in self.lines if line.fits(call)), None)


def table_of(lines: Mapping[str, list[str]]) -> Registry:
    """Return a registry in which these lines are the rules of their ops."""
    table = Registry()
    for op, texts in lines.items():
        # A result that is the same on all ranks does not follow from metadata: ranks without data call the op, too.
        takes_empty = any(_SAME.search(text) for text in texts)
        table.define(Op(op, Source(texts), takes_empty=takes_empty, origin="generated", file=f"ops/{FILE}"))
    return table


@lru_cache(maxsize=1)
def table() -> Registry:
    """Return the registry of the rules in generated.txt."""
    return table_of(read(resources.files(__package__).joinpath(FILE).read_text()))
