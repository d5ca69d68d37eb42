"""Reading the clauses of a rule; `rule` explains them.

>>> scanner = Scanner("linear 0 | 1+2 ; size=(a 1)")
>>> clauses = Clauses(scanner, inputs=3, outputs=1)
>>> clauses.read(), scanner.take(";"), clauses.read()
(None, Token(kind='mark', text=';', position=15), None)
>>> clauses.sets, [str(SizeArgument(*item)) for item in clauses.size_arguments.items()]
({'linear': ((0,), (1, 2))}, ['size=(a 1)'])
"""

from __future__ import annotations

from typing import NamedTuple

from ..sharding.placement import REDUCE_OPS
from .patterns import Dim, Scanner, Token, dim_text

Positions = tuple[int, ...]
Entry = Dim | int | None
"""An entry of a size argument: the size of a dim, a fixed number, or None for any other number."""

PASSING = ("linear", "monotone", "antitone")
"""The clauses that let operands stay Partial during the call."""


class SizeArgument(NamedTuple):
    """An argument of the op that contains sizes."""

    name: str
    entries: tuple[Entry, ...]

    def __str__(self) -> str:
        return f"{self.name}=({' '.join(map(_entry_text, self.entries))})"


def _entry_text(entry: Entry) -> str:
    return "_" if entry is None else str(entry) if isinstance(entry, int) else dim_text(entry)


class Clauses:
    """The clauses of one rule, read from a scanner."""

    def __init__(self, scanner: Scanner, inputs: int, outputs: int) -> None:
        self.scanner, self.inputs, self.outputs = scanner, inputs, outputs
        self.sets: dict[str, tuple[Positions, ...]] = {}
        self.reduce: tuple[str, ...] = ("sum",) * outputs
        self.ragged = self.unread = False
        self.sizes: dict[str, int] = {}
        self.size_arguments: dict[str, tuple[Entry, ...]] = {}
        self.kernel: list[str] = []
        self.positions: dict[str, int] = {}

    def read(self) -> None:
        """Read one clause."""
        scanner = self.scanner
        word = scanner.expect("name", "start a clause with a word, as in `linear 0`")
        if word.text in self.positions:
            scanner.fail(f"a second clause {word.text!r}", "write each clause once", word.position)
        self.positions[word.text] = word.position
        if scanner.take("="):
            self._read_sizes(word)
        elif word.text in PASSING:
            self.sets[word.text] = self._read_sets()
        elif word.text == "reduce":
            self.reduce = self._read_reduce(word)
        elif word.text == "ragged":
            self.ragged = True
        elif word.text == "unread":
            self.unread = True
        elif word.text == "kernel":
            self.kernel = [self._read_factor()]
            while scanner.take(","):
                self.kernel.append(self._read_factor())
        else:
            known = "linear, monotone, antitone, reduce, ragged, unread, kernel, name=(dims) or factor=size"
            scanner.fail(f"unknown clause {word.text!r}", f"use one of {known}", word.position)

    def _read_factor(self) -> str:
        position = self.scanner.peek.position
        atom = self.scanner.atom()
        if atom.many or atom.replicated or atom.broadcast:
            self.scanner.fail(f"{atom} in a kernel clause", "write the name of one factor, without marks", position)
        return atom.name

    def _read_sets(self) -> tuple[Positions, ...]:
        scanner = self.scanner
        if scanner.take("all"):
            return (tuple(range(self.inputs)),)
        found = []
        while True:
            members: list[int] = []
            while True:
                number = scanner.expect("number", "write operand positions, as in `0 | 1+2`, or `all`")
                if int(number.text) >= self.inputs:
                    fix = f"the rule has {self.inputs} operands, numbered from 0"
                    scanner.fail(f"there is no operand {number.text}", fix, number.position)
                members.append(int(number.text))
                if not scanner.take("+"):
                    break
            found.append(tuple(sorted(set(members))))
            if not scanner.take("|"):
                return tuple(sorted(set(found)))

    def _read_reduce(self, word: Token) -> tuple[str, ...]:
        ops = []
        while True:
            op = self.scanner.expect("name", f"use one of {', '.join(REDUCE_OPS)}, none, same")
            if op.text not in (*REDUCE_OPS, "none", "same"):
                fix = f"use one of {', '.join(REDUCE_OPS)}, none, same"
                self.scanner.fail(f"unknown reduction {op.text!r}", fix, op.position)
            ops.append(op.text)
            if not self.scanner.take(","):
                break
        if len(ops) not in (1, self.outputs):
            fix = f"write one for all outputs, or one for each of the {self.outputs}"
            self.scanner.fail(f"{len(ops)} reductions for {self.outputs} outputs", fix, word.position)
        return tuple(ops) if len(ops) == self.outputs else (ops[0],) * self.outputs

    def _read_sizes(self, word: Token) -> None:
        scanner = self.scanner
        number = scanner.take("number")
        if number:
            self.sizes[word.text] = int(number.text)
            return
        opening = scanner.expect("(", "write name=(dims) for a size argument, factor=2 for a factor's size")
        entries: list[Entry] = []
        while not scanner.take(")"):
            position = scanner.peek.position
            literal = scanner.take("number")
            if literal:
                entries.append(int(literal.text))
            elif scanner.take("_"):
                entries.append(None)
            elif scanner.peek.kind == "name" or scanner.peek.text == "(":
                entries.append(scanner.dim())
            else:
                scanner.close(opening)
            entry = entries[-1]
            if isinstance(entry, tuple) and any(atom.replicated or atom.broadcast for atom in entry):
                scanner.fail(f"{dim_text(entry)} in a size argument", "write names of factors without marks", position)
        self.size_arguments[word.text] = tuple(entries)
