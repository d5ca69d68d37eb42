"""Texts for rules that depend on ranks, dim arguments and shapes.

>>> pointwise(2, "linear 0+1")
'b?.., b?.. -> b.. ; linear 0+1'
>>> whole_dims("x", 3, [-1])
'x0 x1 [x2]'
>>> reduction(3, [1], keepdim=True, reduce="max")
'x0 x1 x2 -> x0 1 x2 ; monotone 0 ; reduce max'
>>> view_rule((24, 8), (4, 48))
'(a b) c -> a (b c) ; size=(a (b c))'
"""

from __future__ import annotations

import itertools
import math
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence

from .patterns import RuleError


def join(*parts: str) -> str:
    """A rule's sides and its clauses, those that are not empty."""
    return " ; ".join(filter(None, parts))


def pointwise(operands: int, *clauses: str) -> str:
    """The rule of an elementwise op of so many operands, of any ranks, that broadcast against each other."""
    return join(f"{', '.join(['b?..'] * operands)} -> b..", *clauses)


def normalized(ndim: int, dims: int | Sequence[int] | None) -> list[int]:
    """Dim arguments as sorted dims >= 0; all dims for None. A 0-dim tensor has a dim 0 that means nothing."""
    if dims is None:
        return list(range(ndim))
    given = (dims,) if isinstance(dims, int) else dims
    return sorted({dim % ndim for dim in given}) if ndim else []


def dims_text(name: str, ndim: int, special: Mapping[int, str]) -> str:
    """The pattern x0 x1 ..., with other texts for some dims; an empty text leaves the dim out.

    >>> dims_text("x", 3, {1: "k"})
    'x0 k x2'
    """
    return " ".join(text for i in range(ndim) if (text := special.get(i, f"{name}{i}")))


def whole_dims(name: str, ndim: int, dims: int | Sequence[int] | None) -> str:
    """The pattern x0 x1 ..., with these dims whole."""
    name = name.removesuffix("..")
    return dims_text(name, ndim, {dim: f"[{name}{dim}]" for dim in normalized(ndim, dims)})


def reduction(
    ndim: int, dims: int | Sequence[int] | None, keepdim: bool = False, reduce: str = "sum", linear: bool = True
) -> str:
    """The rule of a reduction of one tensor over these dims (None or none at all: over all).

    `linear` lets Partial operands pass where reducing twice is reducing once: sums of sums, maxima of maxima.
    """
    reduced = normalized(ndim, dims) or list(range(ndim))
    result = dims_text("x", ndim, dict.fromkeys(reduced, "1" if keepdim else ""))
    passing = {"sum": "linear 0", "avg": "linear 0", "max": "monotone 0", "min": "monotone 0"}.get(reduce, "")
    clause = "" if reduce == "sum" else f"reduce {reduce}"
    return join(f"{dims_text('x', ndim, {})} -> {result}".strip(), passing if linear else "", clause)


# ---- views ------------------------------------------------------------------------------------------------------


def view_rule(old: Sequence[int], new: Sequence[int], argument: str | None = "size") -> str:
    """The rule of reshaping `old` into `new`; `argument` is the op's argument that holds the new shape, if any.

    Both shapes are walked from the left. Where the products of the sizes passed so far agree, what is common to
    the two dims is a factor of both; where they do not, the dim that is behind is passed as a whole.

    >>> view_rule((6, 4), (4, 6))
    '(a [b]) [c] -> (a [d]) [e] ; a=2 ; size=((a d) e)'
    """
    if math.prod(old) != math.prod(new):
        raise RuleError(f"{list(old)} cannot be viewed as {list(new)}", "both shapes have the same number of elements")
    walk = _Walk(old, new)
    if math.prod(old) == 0:
        walk.common_prefix()
    else:
        walk.run()
    order = dict.fromkeys(factor for dim in (*walk.left, *walk.right) for factor in dim)
    names = dict(zip(order, _names(), strict=False))
    marked = {factor: f"[{name}]" if factor in walk.whole else name for factor, name in names.items()}
    left, right = (" ".join(_group([marked[f] for f in dim], "1") for dim in side) for side in (walk.left, walk.right))
    fixed = [f"{names[factor]}={walk.sizes[factor]}" for factor in walk.untold(order)]
    entries = " ".join(_group([names[f] for f in dim], "1") for dim in walk.right)
    return join(f"{left} -> {right}".strip(), *fixed, f"{argument}=({entries})" if argument else "")


def _names() -> Iterator[str]:
    for suffix in itertools.chain([""], map(str, itertools.count(1))):
        yield from (letter + suffix for letter in string.ascii_lowercase)


class _Walk:
    """Two shapes walked in step; `left` and `right` collect the factors of their dims, by number."""

    def __init__(self, old: Sequence[int], new: Sequence[int]) -> None:
        self.old, self.new = old, new
        self.left: list[list[int]] = [[] for _ in old]
        self.right: list[list[int]] = [[] for _ in new]
        self.sizes: list[int] = []
        self.whole: set[int] = set()

    def factor(self, size: int, *dims: list[int]) -> None:
        """A new factor at the end of these dims: of one dim alone it is whole."""
        if len(dims) == 1:
            self.whole.add(len(self.sizes))
        for dim in dims:
            dim.append(len(self.sizes))
        self.sizes.append(size)

    def run(self) -> None:
        i = j = -1
        rest_old = rest_new = passed_old = passed_new = 1
        while True:
            while rest_old == 1 and i + 1 < len(self.old):
                i, rest_old = i + 1, self.old[i + 1]
            while rest_new == 1 and j + 1 < len(self.new):
                j, rest_new = j + 1, self.new[j + 1]
            if rest_old == rest_new == 1:
                return
            common = math.gcd(rest_old, rest_new) if passed_old == passed_new else 1
            if common > 1:
                self.factor(common, self.left[i], self.right[j])
                rest_old, rest_new = rest_old // common, rest_new // common
                passed_old, passed_new = passed_old * common, passed_new * common
            elif passed_old <= passed_new and rest_old > 1:
                self.factor(rest_old, self.left[i])
                rest_old, passed_old = 1, passed_old * rest_old
            else:
                self.factor(rest_new, self.right[j])
                rest_new, passed_new = 1, passed_new * rest_new

    def common_prefix(self) -> None:
        """For tensors without elements, where products tell nothing: the dims up to the first difference."""
        for d, (size_old, size_new) in enumerate(zip(self.old, self.new, strict=False)):
            if size_old != size_new:
                break
            self.factor(size_old, self.left[d], self.right[d])
        for side, shape in ((self.left, self.old), (self.right, self.new)):
            for dim, size in zip(side, shape, strict=True):
                if not dim and size != 1:
                    self.factor(size, dim)

    def untold(self, order: Iterable[int]) -> list[int]:
        """The factors whose sizes the two shapes do not tell: compounds with more than one unknown."""
        told: set[int] = set()
        named: list[int] = []
        while len(told) < len(self.sizes):
            unknown = [set(dim) - told for dim in (*self.left, *self.right)]
            found = {factor for factors in unknown if len(factors) == 1 for factor in factors}
            if not found:
                found = {next(factor for factor in order if factor not in told)}
                named += found
            told |= found
        return named


def _group(names: Sequence[str], empty: str) -> str:
    return empty if not names else names[0] if len(names) == 1 else f"({' '.join(names)})"
