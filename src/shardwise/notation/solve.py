"""Solving for the sizes of a rule's factors, given shapes and sizes by name.

>>> frame = make_frame(parse("(a b) c -> a (b c)"), (2,), None, ())
>>> Solver(parse("(a b) c -> a (b c)"), frame, [(24, 8)], ragged=False).solve({"a": 4})
[4, 6, 8]
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from .frame import UNKNOWN, BindError, BoundEntry, Frame, Slot
from .kind import FactorKind
from .rule import Rule

Given = Mapping[str, int | Sequence[int]]
"""Sizes by name: the size of a factor, the sizes of an ellipsis, or the value of a size argument."""


def as_sizes(value: int | Sequence[int]) -> Sequence[int]:
    """Return the value of a size argument as a sequence: an int is one size."""
    return value if isinstance(value, (list, tuple)) else (value,)


def given_ranks(rule: Rule, sizes: Given) -> tuple[tuple[str, int], ...]:
    """Return the number of dims of each ellipsis that follows from the given sizes."""
    ranks = {name: len(value) for name, value in sizes.items() if isinstance(value, (list, tuple))}
    for argument in rule.size_arguments:
        if argument.name not in sizes:
            continue
        entries = ranks.pop(argument.name, 1)
        many = [e[0].name for e in argument.entries if isinstance(e, tuple) and len(e) == 1 and e[0].many]
        if len(many) == 1:
            ranks[many[0]] = max(0, entries - len(argument.entries) + 1)
    return tuple(sorted(ranks.items()))


class Solver:
    """Solves for the sizes of all factors."""

    def __init__(self, rule: Rule, frame: Frame, shapes: Sequence[tuple[int, ...]], ragged: bool) -> None:
        self.rule, self.frame, self.shapes, self.allow_ragged = rule, frame, shapes, ragged
        self.sizes = [UNKNOWN] * len(frame.names)
        self.ragged: set[int] = set()

    def solve(self, given: Given | None) -> list[int]:
        """Return the size of each factor. Raises if a size is unknown, or if shapes contradict each other."""
        sizes, frame = self.sizes, self.frame
        for factor, size in frame.fixed:
            sizes[factor] = size
        pending = self._take_given(given) if given else []
        for slot, shape in zip(frame.slots, self.shapes, strict=False):
            for dim, factor in slot.plain:
                self._set(factor, shape[dim], slot.label)
            for dim, factor in slot.broadcast:
                if shape[dim] != 1:
                    self._set(factor, shape[dim], slot.label)
        if frame.compounds:
            pending += [
                (slot.label, factors, shape[dim])
                for slot, shape in zip(frame.slots, self.shapes, strict=False)
                for dim, factors in slot.compound
            ]
        if pending:
            self._take_products(pending)
        if UNKNOWN in sizes:
            self._take_ones()
        return sizes

    def infer(self, slot: Slot) -> tuple[int, ...]:
        """Return the shape of an output that was not given."""
        for factor in self.ragged:
            if any(factor in dim for dim in slot.dims):
                name = self.frame.names[factor]
                raise BindError(
                    f"factor {name} has several sizes in the rule {self.rule!s}", "pass the shapes of the outputs"
                )
        return tuple(math.prod(self.sizes[factor] for factor in dim) for dim in slot.dims)

    def _set(self, factor: int, size: int, where: str) -> None:
        if self.sizes[factor] == UNKNOWN:
            self.sizes[factor] = size
        elif self.sizes[factor] != size:
            self._disagree(factor, size, where)

    def _take_given(self, given: Given) -> list[tuple[str, tuple[int, ...], int]]:
        """Set the factors given by name; return the products that follow from size arguments."""
        index = {name: i for i, name in enumerate(self.frame.names)}
        arguments = dict(self.frame.size_args)
        pending = []
        for name, value in given.items():
            if name in arguments:
                entries, values = arguments[name], as_sizes(value)
                check_length(self.rule, name, entries, values)
                for entry, size in zip(entries, values, strict=True):
                    if isinstance(entry, tuple) and size >= 0:
                        pending.append((f"argument {name}", entry, size))
            elif not isinstance(value, (list, tuple)):
                if name in index:
                    self._set(index[name], as_sizes(value)[0], "the sizes given")
            else:
                for i, size in enumerate(value):
                    if f"{name}{i}" in index:
                        self._set(index[f"{name}{i}"], size, "the sizes given")
        return pending

    def _take_products(self, pending: list[tuple[str, tuple[int, ...], int]]) -> None:
        """Solve products with one unknown factor until none is left, and check those without unknowns."""
        while pending:
            left = []
            for where, factors, size in pending:
                unknown = [factor for factor in factors if self.sizes[factor] == UNKNOWN]
                known = math.prod(self.sizes[factor] for factor in factors if self.sizes[factor] != UNKNOWN)
                if len(unknown) > 1 or (unknown and known == 0):
                    left.append((where, factors, size))
                elif unknown and size % known == 0:
                    self.sizes[unknown[0]] = size // known
                elif len(factors) == 1:
                    self._set(factors[0], size, where)
                elif factors and not unknown and self._is_ragged(factors[0], known, size):
                    self.ragged.add(factors[0])
                elif unknown or known != size:
                    names = " ".join(f"{self.frame.names[f]}={self.sizes[f]}" for f in factors if f not in unknown)
                    raise BindError(
                        f"{where} has a dim of size {size} that is not {names or 'a dim of size 1'} "
                        f"{'times another factor ' if unknown else ''}in the rule {self.rule!s}",
                        "pass shapes in which the sizes of the factors multiply to the size of the dim",
                    )
            if len(left) == len(pending):
                return
            pending = left

    def _is_ragged(self, factor: int, known: int, size: int) -> bool:
        """Return whether a dim has another size only because its first factor, which must be replicated, has."""
        if not self.allow_ragged or known == size or self.frame.marks[factor].kind is not FactorKind.REPLICATED:
            return False
        return self.sizes[factor] > 0 and size % (known // self.sizes[factor]) == 0

    def _take_ones(self) -> None:
        """Give size 1 to factors that have size 1 wherever they may broadcast. Raises if others are unknown."""
        for slot, shape in zip(self.frame.slots, self.shapes, strict=False):
            for dim, factor in slot.broadcast:
                if shape[dim] == 1 and self.sizes[factor] == UNKNOWN:
                    self.sizes[factor] = 1
        names = [name for name, size in zip(self.frame.names, self.sizes, strict=True) if size == UNKNOWN]
        if names:
            raise BindError(
                f"the size of factor {' or '.join(names)} does not follow from the shapes, in the rule {self.rule!s}",
                f"pass the shapes of the outputs, or sizes={{{names[0]!r}: ...}}",
            )

    def _disagree(self, factor: int, size: int, where: str) -> None:
        """Handle a factor with two sizes: allowed with a kernel, replicated with the clause `ragged`, else an error."""
        if self.frame.marks[factor].kind is FactorKind.KERNEL:
            return  # each dim is sharded by its own size; the factor has the size of the first operand that has it
        if self.allow_ragged:
            self.ragged.add(factor)
            return
        name, known = self.frame.names[factor], self.sizes[factor]
        raise BindError(
            f"factor {name} has size {known} and, in {where}, size {size} in the rule {self.rule!s}",
            "pass tensors whose dims agree, or add the clause `ragged`",
        )


def check_length(rule: Rule, name: str, entries: Sequence[BoundEntry], values: Sequence[int]) -> None:
    """Raise unless a size argument has as many values as its clause has entries."""
    if len(entries) != len(values):
        problem = f"argument {name} is {list(values)}, which does not fit the rule {rule!s}"
        raise BindError(problem, f"pass {len(entries)} sizes")
