"""Rules: one line says what an op is.

    inputs -> outputs ; clause ; clause

One mesh axis may cut one factor: operands that have it are sharded on it, operands that lack it are replicated
(or Partial, where they are linear only together with one that has it: a bias is added once, not once a rank),
outputs that lack it become Partial. The clauses, all optional:

    linear 0 | 1+2       operands that may be Partial (sum or avg) on an axis, all of a set together, while the others
                         are replicated there; the outputs are then Partial too. `linear all`: all of them together
    monotone 0           the same for Partial max and min; `antitone 0` swaps max and min on the way. With `reduce max`
                         or `min`, outputs become Partial by that op only: a maximum passes maxima, not minima
    reduce max           what an output that lacks a cut factor becomes, for all outputs or one each: `reduce sum, max`.
                         `none`: what such an output lacks may not be cut, unless by a kernel that completes it;
                         `same`: all ranks find the same, such as the state of a generator
    ragged               a factor whose sizes differ between tensors is whole, instead of an error
    unread               operands only lend their dtype and device: they stay as they are, and results are whole
    a=2                  the size of a factor that shapes alone do not tell
    size=(a (b c) 1 _)   the argument `size` holds the sizes of these dims (`_`: some other number)
    kernel v, t          these factors are cut with the help of a local kernel only

An empty pattern is a 0-dim tensor. An empty left side also serves ops without any tensor operand.

>>> rule = parse("m? n?, m k, k n -> m n; linear 0+2|0+1")
>>> rule
Rule('m? n?, m k, k n -> m n ; linear 0+1 | 0+2')
>>> parse(str(rule)) is rule
True
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from ..sharding.placement import REDUCE_OPS
from .patterns import Atom, Dim, Occurrence, Pattern, Scanner, Token, dim_text

Positions = tuple[int, ...]
Entry = Dim | int | None
"""What an entry of a size argument holds: the size of a dim, a fixed number, or something else (None)."""

NO_DIMS = Pattern(())
PASSING = ("linear", "monotone", "antitone")


class SizeArgument(NamedTuple):
    """An argument of the op that holds sizes."""

    name: str
    entries: tuple[Entry, ...]

    def __str__(self) -> str:
        return f"{self.name}=({' '.join(map(_entry_text, self.entries))})"


def _entry_text(entry: Entry) -> str:
    return "_" if entry is None else str(entry) if isinstance(entry, int) else dim_text(entry)


@dataclass(frozen=True, eq=False, repr=False)
class Rule:
    """What an op is. Interned by its text: equal rules are the same object."""

    inputs: tuple[Pattern, ...]
    outputs: tuple[Pattern, ...]
    linear: tuple[Positions, ...]
    monotone: tuple[Positions, ...]
    antitone: tuple[Positions, ...]
    reduce: tuple[str, ...]
    ragged: bool
    unread: bool
    sizes: tuple[tuple[str, int], ...]
    size_arguments: tuple[SizeArgument, ...]
    kernel: tuple[str, ...]
    text: str

    def fits(self, operands: int) -> bool:
        """Whether this can be the rule of an op with so many tensor operands."""
        return operands == len(self.inputs) or (operands == 0 and self.inputs == (NO_DIMS,))

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Rule({self.text!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return parse, (self.text,)

    def __copy__(self) -> Rule:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Rule:
        return self


_interned: WeakValueDictionary[str, Rule] = WeakValueDictionary()


@lru_cache(maxsize=4096)
def parse(text: str) -> Rule:
    """The rule that a line of text means; `RuleError` where it can mean nothing."""
    scanner = Scanner(text)
    inputs = scanner.patterns()
    scanner.expect("arrow", "a rule is written inputs -> outputs ; clauses")
    outputs = scanner.patterns()
    in_tensors = len(scanner.occurrences)
    clauses = _Clauses(scanner, len(inputs), len(outputs))
    while scanner.take(";"):
        clauses.read()
    if scanner.peek.kind != "end":
        scanner.fail(f"{scanner.peek.text!r} is not expected", "tensors are parted by commas, clauses by semicolons")
    seen, named = scanner.occurrences[:in_tensors], scanner.occurrences[in_tensors:]
    _check_factors(scanner, seen, len(inputs))
    _check_clause_names(scanner, clauses, seen, named)
    _check_results(scanner, clauses, seen, named, len(inputs))
    return clauses.rule(inputs, outputs)


@lru_cache(maxsize=4096)
def without_operands(rule: Rule, dropped: frozenset[int]) -> Rule:
    """The rule of the op with numbers in the place of some operands.

    A number is the same on every rank, so an alternative that wants that operand Partial is gone: `add` is jointly
    linear in two tensors, but adding a number is not linear.

    >>> without_operands(parse("a?, a? -> a ; linear 0+1"), frozenset({1}))
    Rule('a? -> a')
    """
    kept = [i for i in range(len(rule.inputs)) if i not in dropped]
    clauses = _clause_texts(rule)
    for keyword in PASSING:
        sets = [tuple(kept.index(i) for i in s) for s in getattr(rule, keyword) if dropped.isdisjoint(s)]
        clauses[keyword] = _sets_text(keyword, sets)
    return parse(_text(tuple(rule.inputs[i] for i in kept), rule.outputs, clauses))


@lru_cache(maxsize=4096)
def without_order(rule: Rule) -> Rule:
    """The rule of the op where results are complex: they have no order, so no maximum or minimum passes.

    >>> without_order(parse("a? -> a ; linear 0 ; monotone 0"))
    Rule('a? -> a ; linear 0')
    """
    return parse(_text(rule.inputs, rule.outputs, _clause_texts(rule) | {"monotone": "", "antitone": ""}))


# ---- clauses ----------------------------------------------------------------------------------------------------


class _Clauses:
    """The clauses of one rule while they are read."""

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
        scanner = self.scanner
        word = scanner.expect("name", "a clause starts with a word, as in `linear 0`")
        if word.text in self.positions:
            scanner.fail(f"a second clause {word.text!r}", "give each clause once", word.position)
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
            known = "linear, monotone, antitone, reduce, ragged, unread, kernel, or name=(dims)"
            scanner.fail(f"unknown clause {word.text!r}", f"a clause is {known}", word.position)

    def _read_factor(self) -> str:
        position = self.scanner.peek.position
        atom = self.scanner.atom()
        if atom.many or atom.whole or atom.broadcast:
            self.scanner.fail(f"{atom} in a kernel clause", "name one factor, without marks", position)
        return atom.name

    def _read_sets(self) -> tuple[Positions, ...]:
        scanner = self.scanner
        if scanner.take("all"):
            return (tuple(range(self.inputs)),)
        found = []
        while True:
            members: list[int] = []
            while True:
                number = scanner.expect("number", "give operand positions, as in `0 | 1+2`, or `all`")
                if int(number.text) >= self.inputs:
                    fix = f"the rule has {self.inputs} operands, counted from 0"
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
            op = self.scanner.expect("name", f"reduce by one of {', '.join(REDUCE_OPS)}, none, same")
            if op.text not in (*REDUCE_OPS, "none", "same"):
                fix = f"use one of {', '.join(REDUCE_OPS)}, none, same"
                self.scanner.fail(f"unknown reduction {op.text!r}", fix, op.position)
            ops.append(op.text)
            if not self.scanner.take(","):
                break
        if len(ops) not in (1, self.outputs):
            fix = f"give one for all, or one for each of the {self.outputs} outputs"
            self.scanner.fail(f"{len(ops)} reductions", fix, word.position)
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
            if isinstance(entry, tuple) and any(atom.whole or atom.broadcast for atom in entry):
                scanner.fail(f"{dim_text(entry)} in a size argument", "name factors without marks", position)
        self.size_arguments[word.text] = tuple(entries)

    def rule(self, inputs: tuple[Pattern, ...], outputs: tuple[Pattern, ...]) -> Rule:
        """The one rule with these patterns and clauses, printed in canonical order."""
        rule = Rule(
            inputs=inputs,
            outputs=outputs,
            linear=self.sets.get("linear", ()),
            monotone=self.sets.get("monotone", ()),
            antitone=self.sets.get("antitone", ()),
            reduce=self.reduce,
            ragged=self.ragged,
            unread=self.unread,
            sizes=tuple(sorted(self.sizes.items())),
            size_arguments=tuple(SizeArgument(*item) for item in sorted(self.size_arguments.items())),
            kernel=tuple(sorted(set(self.kernel))),
            text="",
        )
        text = _text(inputs, outputs, _clause_texts(rule))
        return _interned.setdefault(text, replace(rule, text=text))


def _text(inputs: Sequence[Pattern], outputs: Sequence[Pattern], clauses: Mapping[str, str]) -> str:
    sides = f"{', '.join(map(str, inputs))} -> {', '.join(map(str, outputs))}".strip()
    return " ; ".join((sides, *filter(None, clauses.values())))


def _sets_text(keyword: str, sets: Sequence[Positions]) -> str:
    return f"{keyword} {' | '.join('+'.join(map(str, members)) for members in sets)}" if sets else ""


def _clause_texts(rule: Rule) -> dict[str, str]:
    """The clauses of a rule as they are written, in canonical order; empty where there is nothing to say."""
    texts = {keyword: _sets_text(keyword, getattr(rule, keyword)) for keyword in PASSING}
    ops = set(rule.reduce)
    reduce = rule.reduce[:1] if len(ops) == 1 else rule.reduce
    texts["reduce"] = "" if ops == {"sum"} else f"reduce {', '.join(reduce)}"
    texts["ragged"] = "ragged" if rule.ragged else ""
    texts["unread"] = "unread" if rule.unread else ""
    texts.update({name: f"{name}={size}" for name, size in rule.sizes})
    texts.update({argument.name: str(argument) for argument in rule.size_arguments})
    texts["kernel"] = f"kernel {', '.join(rule.kernel)}" if rule.kernel else ""
    return texts


# ---- checks -----------------------------------------------------------------------------------------------------


def _check_factors(scanner: Scanner, seen: Sequence[Occurrence], inputs: int) -> None:
    """Each factor means one thing everywhere, and a tensor has it once."""
    first: dict[str, Atom] = {}
    in_tensor: set[tuple[int, str]] = set()
    for atom, tensor, position in seen:
        if atom.broadcast and tensor >= inputs:
            scanner.fail(f"{atom} in an output", "only operands broadcast: leave the ? out", position)
        known = first.setdefault(atom.name, atom)
        if atom.name == "_":
            if atom.many and (tensor, "_..") in in_tensor:
                scanner.fail("a second _.. in one tensor", "one of them takes all dims that are left over", position)
            in_tensor.add((tensor, str(atom)))
            continue
        if atom.whole != known.whole:
            fix = f"write [{atom.name}] everywhere"
            scanner.fail(f"{atom.name} is whole in one place and not in another", fix, position)
        if atom.many != known.many:
            scanner.fail(f"{atom.name} is one dim in one place and any number in another", "use two names", position)
        if (tensor, atom.name) in in_tensor and not atom.whole:
            fix = f"a diagonal cannot be cut: write [{atom.name}]"
            scanner.fail(f"{atom.name} twice in one tensor", fix, position)
        in_tensor.add((tensor, atom.name))
    for atom, _, position in seen:
        stem = re.sub(r"\d+$", "", atom.name)
        if stem != atom.name and stem in first and first[stem].many:
            scanner.fail(f"{atom.name} is also a dim of {stem}..", "use another name", position)


def _check_clause_names(
    scanner: Scanner, clauses: _Clauses, seen: Sequence[Occurrence], named: Sequence[Occurrence]
) -> None:
    """Clauses speak of factors that the tensors have, in the same way."""
    factors = {atom.name: atom for atom, _, _ in seen}
    for atom, _, position in named:
        if atom.name == "_" or atom.name not in factors:
            scanner.fail(f"no tensor has the factor {atom.name}", "a clause names factors of the tensors", position)
        if atom.many != factors[atom.name].many:
            fix = f"write {factors[atom.name]._replace(whole=False, broadcast=False)}"
            scanner.fail(f"{atom} is written otherwise in the tensors", fix, position)
    for name in clauses.kernel:
        if factors[name].whole:
            fix = "a kernel is for cutting it: leave the brackets out"
            scanner.fail(f"{name} is whole and has a kernel", fix, clauses.positions["kernel"])
    for name in clauses.sizes:
        if name not in factors or factors[name].many:
            scanner.fail(f"{name} is no factor", f"write {name}=(dims) for an argument", clauses.positions[name])
    for name in clauses.size_arguments:
        if name in factors:
            fix = "rename the factor, so that sizes can be given by name"
            scanner.fail(f"{name} is an argument and a factor", fix, clauses.positions[name])


def _check_results(
    scanner: Scanner, clauses: _Clauses, seen: Sequence[Occurrence], named: Sequence[Occurrence], inputs: int
) -> None:
    """An output's factor comes from somewhere: from operands, from a size argument, or it cannot simply be cut."""
    known = {atom.name for atom, tensor, _ in seen if tensor < inputs} | {atom.name for atom, _, _ in named}
    for atom, _, position in seen:
        if atom.name != "_" and atom.name not in known and not atom.whole:
            fix = f"write [{atom.name}], name it in a size argument, or give it a kernel"
            scanner.fail(f"only an output has the factor {atom.name}", fix, position)
