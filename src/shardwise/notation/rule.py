"""A rule: one line that describes an op, `inputs -> outputs ; clause ; clause`.

The tensors are written as `patterns` explains. A mesh axis may shard one factor. Then operands and outputs that have
the factor are sharded along it. Operands that lack it are replicated (or Partial, if they are added to the result: see
`bind.summands`). Outputs that lack it are Partial. The clauses, all optional:

    linear 0 | 1+2       operand 0 may be Partial (sum or avg) on an axis, or 1 and 2 together, while all others are
                         replicated there; the outputs are Partial then. `linear all`: all operands together
    monotone 0           as `linear`, for Partial max and min
    antitone 0           as `monotone`, but a max gives a min and a min gives a max
    reduce max           the op of outputs that lack a sharded factor: one for all outputs, or one each (`reduce sum,
                         max`). Default: sum. `none`: such a factor must be replicated, or handled by a kernel;
                         `same`: the output is replicated, since all ranks compute the same
    kernel v, t          these factors are sharded only with the help of a kernel of the op
    ragged               a factor whose size differs between tensors must be replicated, instead of an error
    unread               the op reads only dtype and device of its operands, not their values; results are replicated
    a=2                  the size of a factor that does not follow from the shapes
    size=(a (b c) 1 _)   the argument `size` of the op contains the sizes of these dims; `_` is any other number

An empty pattern is a 0-dim tensor. An empty left side also fits ops without tensor operands.

>>> rule = parse("m? n?, m k, k n -> m n; linear 0+2|0+1")
>>> rule
Rule('m? n?, m k, k n -> m n ; linear 0+1 | 0+2')
>>> parse(str(rule)) is rule
True
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from weakref import WeakValueDictionary

from .checks import check_clause_names, check_factors, check_outputs
from .clauses import PASSING, Clauses, Positions, SizeArgument
from .patterns import Pattern, Scanner

NO_DIMS = Pattern(())


@dataclass(frozen=True, eq=False, repr=False)
class Rule:
    """The description of an op. Rules are interned by their text: equal rules are the same object.

    >>> rule = parse("m k, k n -> m n ; linear 0 | 1")
    >>> [str(pattern) for pattern in rule.inputs], [str(pattern) for pattern in rule.outputs]
    (['m k', 'k n'], ['m n'])
    """

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
        """Return whether this can be the rule of an op with this number of tensor operands."""
        return operands == len(self.inputs) or (operands == 0 and self.inputs == (NO_DIMS,))

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Rule({self.text!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return parse, (self.text,)

    def __copy__(self) -> Rule:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Rule:
        return self


_interned: WeakValueDictionary[str, Rule] = WeakValueDictionary()


@lru_cache(maxsize=4096)
def parse(text: str) -> Rule:
    """Return the rule with this text. Raises `RuleError` if the text is invalid.

    >>> parse("m k,k n->m n;linear 0|1")
    Rule('m k, k n -> m n ; linear 0 | 1')
    """
    scanner = Scanner(text)
    inputs = scanner.patterns()
    scanner.expect("arrow", "write inputs -> outputs ; clauses")
    outputs = scanner.patterns()
    in_tensors = len(scanner.occurrences)
    clauses = Clauses(scanner, len(inputs), len(outputs))
    while scanner.take(";"):
        clauses.read()
    if scanner.peek.kind != "end":
        scanner.fail(f"unexpected {scanner.peek.text!r}", "separate tensors by commas, clauses by semicolons")
    seen, named = scanner.occurrences[:in_tensors], scanner.occurrences[in_tensors:]
    check_factors(scanner, seen, len(inputs))
    check_clause_names(scanner, clauses, seen, named)
    check_outputs(scanner, seen, named, len(inputs))
    return _make(inputs, outputs, clauses)


@lru_cache(maxsize=4096)
def without_operands(rule: Rule, dropped: frozenset[int]) -> Rule:
    """Return the rule of the op with numbers in place of some operands.

    A number is the same on every rank, so alternatives in which that operand is Partial are dropped: `add` is linear in
    two tensors together, but adding a number is not linear.

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
    """Return the rule for complex results, which have no order: Partial max and min do not pass.

    >>> without_order(parse("a? -> a ; linear 0 ; monotone 0"))
    Rule('a? -> a ; linear 0')
    """
    return parse(_text(rule.inputs, rule.outputs, _clause_texts(rule) | {"monotone": "", "antitone": ""}))


# ---- text -----------------------------------------------------------------------------------------------------------


def _make(inputs: tuple[Pattern, ...], outputs: tuple[Pattern, ...], clauses: Clauses) -> Rule:
    """Return the one rule with these patterns and clauses, printed in canonical order."""
    rule = Rule(
        inputs=inputs,
        outputs=outputs,
        linear=clauses.sets.get("linear", ()),
        monotone=clauses.sets.get("monotone", ()),
        antitone=clauses.sets.get("antitone", ()),
        reduce=clauses.reduce,
        ragged=clauses.ragged,
        unread=clauses.unread,
        sizes=tuple(sorted(clauses.sizes.items())),
        size_arguments=tuple(SizeArgument(*item) for item in sorted(clauses.size_arguments.items())),
        kernel=tuple(sorted(set(clauses.kernel))),
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
    """Return the texts of the clauses of a rule by name, in canonical order; empty for a clause it does not have."""
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
